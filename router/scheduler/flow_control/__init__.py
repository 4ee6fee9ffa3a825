"""Admission: the flow control queue, fairness between tenants, saturation, credits."""
