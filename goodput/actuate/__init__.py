"""What carries out a controller's actions: processes of this machine, Ray, Kubernetes. One protocol for all."""
