"""HTTP/1.1 where it is hot: clients' connections for generation, and engines' for legs.

A callback for each piece that comes instead of a task for each request, and bytes that are passed on as they are.
Everything else is aiohttp's (docs/decisions/0006-the-hot-path.md has both measured).
"""
