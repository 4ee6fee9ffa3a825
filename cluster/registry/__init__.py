"""Who is in the fleet: heartbeats, the rules that fold them, and where they are kept (Redis, or memory)."""
