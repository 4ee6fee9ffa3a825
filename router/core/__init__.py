"""Pure and small: the journey, eligibility, service levels, values that all rooms share."""
