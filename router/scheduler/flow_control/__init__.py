"""Flow control (admission): the queue, fairness between tenants, saturation, credits."""
