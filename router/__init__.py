"""The router: takes OpenAI requests, chooses a prefill and a decode instance, and carries the answer back.

Each folder imports only the folders named after it (`lint-imports`): `api`, `admin`, `request`, `scheduler`,
`telemetry`, `fleet`, `predict`, `http`, `core`. docs/architecture.md says what each is for.
"""
