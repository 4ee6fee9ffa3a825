"""What the two halves of a hand-over share: transfer fields, hold marks, notices, block digests, layouts, tickets, the
guard and the agent socket.

The rules are in `prefill` (the producer's holds and what ends them) and `decode` (the consumer's pulls, and when their
blocks may be used). Modules that run inside vLLM's process import only the standard library and `cluster.ids` or
`cluster.wire` besides each other, so that they work with any versions that vLLM pins.
"""
