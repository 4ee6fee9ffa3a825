"""What a place for one request costs the fleet: `ask.prices_of`. See `base`."""
