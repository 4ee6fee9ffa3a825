"""Filters, policies, prices of places (the scorer), break-even, the handoff guard. Pure."""
