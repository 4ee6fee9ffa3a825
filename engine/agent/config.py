"""The settings of an agent. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.ticket import SigningKey


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The settings of an agent."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port of the agent's own HTTP; 0 = a free one."""
    drain_s: float = 30.0
    """Longest drain after SIGTERM, in seconds."""
    linger_s: float = 0.0
    """For how many seconds an instance that is ready takes work after SIGTERM, before it drains."""
    revision: str = ""
    weights: Callable[[], str] = str
    """Identifies the weights that the engine serves (`engine.vllm.weights`); may read files. Empty: unknown."""
    adapter: Callable[[str], str] = lambda _: ""
    """Identifies the files in a LoRA adapter's folder; may read them. Empty: unknown."""
    adapter_marks: Callable[[str], tuple[object, ...]] = lambda _: ()
    """Tells whether those files were touched since (`engine.vllm.adapters`)."""
    node: str = ""
    """Identifies the machine (`engine.agent.node`)."""
    tenants: tuple[str, ...] = ()
    """The only tenants whose requests the instance serves; none: all tenants."""
    ticket_keys: Callable[[], tuple[SigningKey, ...]] | None = None
    """Gives this instance's ticket keys, which check requests to its agent. None: it has no keys."""
    admin_keys: Callable[[], tuple[str, ...]] | None = None
    """Gives the digests of operators' keys, for requests from other machines. None: there are no such keys."""
