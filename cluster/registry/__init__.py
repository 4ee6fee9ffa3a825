"""Membership of the fleet: heartbeats, the rules that fold them, and their registry in Redis or in memory."""
