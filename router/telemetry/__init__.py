"""Telemetry about requests: metrics, rolling statistics, times by part, the explain store."""
