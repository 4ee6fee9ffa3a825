"""HTTP/1.1: how messages are read and written by whatever of Baton speaks it, each within bounds.

Heads of requests (`heads`), bodies in chunks (`framing`), lines of heads (`headers`).
"""
