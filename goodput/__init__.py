"""Goodput optimizer: how many instances of which kind keep the promises, and how to get there."""
