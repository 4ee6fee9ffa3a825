"""The `baton` command: the only composition root. No other package imports it."""

__version__ = "0.1.0"
