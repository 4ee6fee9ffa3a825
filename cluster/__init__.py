"""Shared nouns of a Baton cluster: ids, roles, instances, errors, and the wire format of a hand-over.

Everything here is pure (no sockets, clocks, environment) except `telemetry`, the one place where logs, metrics and
spans are set up.
"""
