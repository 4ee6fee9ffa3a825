"""`baton` with a controller that calculates with the costs of another model and GPU, so that it can size pools.

`python -m support.flipping_up up FILE ...`. The project ships neither sizes of the tiny model nor costs of CPU cores.
So the controller calculates with Llama-3.1-8B on an L4, which is about as fast with a prompt as the tiny model is on
two cores.
"""

from __future__ import annotations

import sys

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from baton import cli, scaling  # noqa: E402 - see above
from costs.hardware import find_gpu  # noqa: E402
from costs.shipped import find_model  # noqa: E402

if __name__ == "__main__":
    scaling.find_model = lambda _: find_model("meta-llama/Llama-3.1-8B")
    scaling._gpu = lambda *_: find_gpu("L4")  # type: ignore[assignment]
    sys.exit(cli.main())
