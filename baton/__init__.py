"""The `baton` command: the only composition root. Nobody imports it."""

__version__ = "0.1.0"
