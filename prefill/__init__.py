"""Rules of a prefill instance (pure): how many legs it takes, and when it has nothing left that somebody waits for."""
