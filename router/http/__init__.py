"""HTTP/1.1 on the hot path: clients' connections for generation, and engines' connections for legs.

A callback for each arriving piece replaces a task for each request, and bytes are passed on unchanged. aiohttp serves
everything else (docs/decisions/0006-the-hot-path.md has both measured).
"""
