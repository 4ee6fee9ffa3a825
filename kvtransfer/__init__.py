"""What the two halves of a hand-over share: fields, marks, notices, digests, layouts, tickets, the guard and the door.

The rules are in `prefill` (who holds which KV blocks, and who may end it) and `decode` (what is pulled, and when it may
be used). Modules that run inside vLLM's process import only the standard library and `cluster.ids` or `cluster.wire`
besides each other, so that they work with whatever vLLM pins.
"""
