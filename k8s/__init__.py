"""Kubernetes: the resources, the pure plan that makes a cluster follow them, and the operator that carries it out."""
