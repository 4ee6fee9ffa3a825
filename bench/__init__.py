"""Benchmarks: each a module that `make bench-…` runs, none of them imported by the product.

With ``BATON_COMPILED=1`` they run the modules that `make compile` has made, or refuse to run.
"""

import os
import sys

from baton import compiled

if os.environ.get(compiled.OFF) == "1" and (because := compiled.use()):
    sys.exit(f"{compiled.OFF} is 1, and nothing compiled is used: {because} (make compile)")
