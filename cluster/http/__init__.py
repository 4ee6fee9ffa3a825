"""HTTP/1.1 on httptools, read within bounds: shared by the router, the load generator and the mock.

`heads` reads heads of requests, `framing` bodies in chunks, `requests` whole requests, `answers` answers; `headers`
finds and writes lines of heads; `pool` keeps connections to one endpoint. No other package of the product imports
httptools (tests/unit/test_layers.py).
"""
