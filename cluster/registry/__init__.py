"""Membership of the fleet: heartbeats, the rules that fold them, and the registry that keeps them (Redis, or
memory).
"""
