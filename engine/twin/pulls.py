"""The twin's pulls: `decode.pulls` and `decode.reads`, as an engine of one rank runs them, on the twin's clock.

Those modules have all the rules. A twin needs no introduction: it may pull from each life of a producer whose hold a
request names.
"""

from __future__ import annotations

from typing import Final

from cluster.ids import RequestId
from decode.peers import ProducerPeers
from decode.pulls import Pulls as Wants
from decode.pulls import worth_pulling
from decode.reads import PullAtRank
from decode.table import PullAct, PullCause, Reading
from engine.twin.events import Effect, GiveBack, NotUsed
from engine.twin.request import HoldSource, Sequence

NS = 1_000_000_000


class TwinPulls:
    """The pulls of one life of an engine. The owner of the clock sets `now_ns`."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.external_tokens = 0
        """The number of tokens that were pulled and used."""
        self.wants: Final = Wants(ProducerPeers(NS))
        self._reading: Final[dict[RequestId, PullAtRank]] = {}
        self._engines: Final[dict[tuple[str, int], str]] = {}
        """Lives of producers by name and epoch."""

    def worth(self, sequence: Sequence, local_tokens: int) -> int:
        """The number of a prompt's tokens to pull; 0: none, and this engine computes the tokens that P holds."""
        source = sequence.request.pull
        if source is None or sequence.pulled:
            return 0
        tokens = worth_pulling(source.tokens, sequence.text.prompt_tokens, local_tokens)
        if source.slot is None or self.wants.judge(sequence.request.id, self._met(source), self.now_ns):
            self.wants.local(sequence.request.id, tokens if source.handed_over else 0)
            return 0
        return tokens

    def _met(self, source: HoldSource) -> str:
        life = source.producer, source.transfer.producer_epoch
        engine = self._engines.get(life)
        if engine is None:
            engine = self._engines[life] = f"{source.producer}@{source.transfer.producer_epoch}"
            self.wants.peers.met(engine, source.producer, self.now_ns)
        return engine

    def allocated(self, sequence: Sequence, source: HoldSource, tokens: int) -> None:
        """There is room for the request, and `tokens` of its tokens are pulled."""
        request = sequence.request.id
        met = self._met(source)
        self.wants.allocated(request, met, tokens, self.now_ns, handed_over=source.handed_over)
        if tokens and source.slot is not None:
            self._reading[request] = PullAtRank(source.slot.mark)

    def ended(self, sequence: Sequence, *, read: bool, said: bytes | None, wrong: str) -> list[Effect]:
        """The request's blocks were read, or not; `said`: its slot's content afterwards (None: unreadable); `wrong`:
        the digests' result. Returns what follows: a notice to the producer, a prompt to compute here.
        """
        source = sequence.request.pull
        assert source is not None, "it is pulling"
        pull = self._confirmed(sequence.id, read=read, said=said, wrong=wrong)
        effects: list[Effect] = []
        if PullAct.GIVE_BACK in pull.acts:
            effects.append(GiveBack(self.now_ns, source))
        sequence.lost_pull = pull.state is not Reading.USED
        sequence.pull_blocks = ()
        if sequence.lost_pull:
            effects.append(NotUsed(self.now_ns, sequence.id, pull.because))
        else:
            self.external_tokens += sequence.remote_tokens
        return effects

    def _confirmed(self, request: RequestId, *, read: bool, said: bytes | None, wrong: str) -> PullAtRank:
        pull = self._reading.pop(request)
        if not read:
            pull.tell(PullCause.READ_FAILED)
        pull.tell(PullCause.ALL_READ)
        if said is None:
            pull.tell(PullCause.LOOK_FAILED)
        else:
            pull.saw(said)
        pull.tell(PullCause.ALL_SEEN)
        if pull.state is Reading.CONFIRMED:
            pull.compared(wrong)
        self.wants.said(request, pull.because)
        self.wants.ended(request, self.now_ns)
        return pull

    def finished(self, request: RequestId) -> None:
        """The request is over."""
        self.wants.finished(request)
