"""`baton` on a machine where another program takes ports of the engines after `baton up` has chosen them.

`python -m support.thieving_up up ...`: of the first engine its agent's port, of the second its own, of the third its
side channel's.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

from baton import compiled

compiled.use()  # before any compiled module is imported, as `baton` itself does

from baton import cli, plan  # noqa: E402 - see above
from baton.commands import up  # noqa: E402

PORTS = ("agent_port", "port", "side_channel_port")

stolen: list[socket.socket] = []


def place_and_steal(*given: Any) -> Any:
    planned = plan.place(*given)
    ports = [getattr(each, name) for each, name in zip(planned, PORTS, strict=True)]
    stolen.extend(socket.create_server(("127.0.0.1", port)) for port in ports)
    print(f"stolen: {ports}", file=sys.stderr)
    return planned


if __name__ == "__main__":
    vars(up)["place"] = place_and_steal
    sys.exit(cli.main())
