"""`baton`, whose controller takes the engines of the tiny model for ones whose costs are known, so that it sizes them.

`python -m support.flipping_up up FILE ...`. No sizes of the tiny model ship, and no costs of this machine's cores: what
the controller decides from is Llama-3.1-8B on an L4, about as quick with a prompt as the tiny model on two cores.
"""

from __future__ import annotations

import sys

from baton import compiled

compiled.use()  # before anything that is compiled is imported, as `baton` itself does

from baton import cli, scaling  # noqa: E402 - see above
from costs.hardware import find_gpu  # noqa: E402
from costs.shipped import find_model  # noqa: E402

if __name__ == "__main__":
    scaling.find_model = lambda _: find_model("meta-llama/Llama-3.1-8B")
    scaling._gpu = lambda *_: find_gpu("L4")  # type: ignore[assignment]
    sys.exit(cli.main())
