"""What operators speak: explain, drain, quarantine, `/ui` and its numbers, several routers as one."""
