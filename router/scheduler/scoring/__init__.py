"""Scoring: filters, policies, the scorer (prices of places), break-even, the hand-over guard. Pure."""
