"""Rules of a decode instance (pure): how many streams it takes, and when its last one has ended."""
