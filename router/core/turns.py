"""Turns: how long one instance may keep a client waiting while another could take over, and which one may. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from cluster.ids import InstanceId
from router.core.events import Choose, PrefixSource

TURN = 0.5
"""The share of a waiting client's time that one instance may use up while another could still take over."""

TURN_LEAST_S = 0.1
"""A turn of fewer seconds is too short for a prefill: then no other instance is asked."""

SLOWER = 2.0
"""A leg counts as silent after so many times the expected time: of an answer in one piece, and of a prompt if the
instance that holds it is lost."""

LOST_LEAST_S = 1.0
"""The least time of a leg whose holder is lost, in seconds: its instance may compute the prompt already."""


def turn_s(left_s: float, silent_s: float = 0.0, pulled: PrefixSource | None = None) -> float:
    """Seconds from now to the end of a leg's turn.

    A leg that pulls a prompt's beginning has as long as the prompt is expected to take without that, and as long as the
    source's answer may take: a source that stands still during the pull costs no more. If no other instance can begin
    then, the leg has as long again as it was silent.

    Args:
        left_s: seconds to the deadline.
        silent_s: seconds since the leg was sent.
        pulled: the source of the hold that the leg pulls; None: it pulls nothing.
    """
    half_s = left_s * TURN
    if half_s < TURN_LEAST_S:
        return left_s
    if pulled is None or pulled.cold_s <= 0:
        return half_s
    expected_s = pulled.cold_s + pulled.wait_s
    rest_s = expected_s - silent_s if silent_s < expected_s else silent_s
    return min(half_s, max(TURN_LEAST_S, rest_s))


def after_loss(holder: InstanceId, prompt_s: float, silent_s: float, answer_s: float) -> PrefixSource:
    """What a leg pulls whose holder is lost. From now on the leg has some time in which its instance may find that out
    and compute the prompt itself: `SLOWER` times as long as the prompt took. An instance that takes longer, as the
    holder had most of the prompt cached, may be replaced while it computes.

    Args:
        holder: the instance that computed the prompt.
        prompt_s: seconds from the request's arrival to the prompt's end.
        silent_s: seconds since the answering leg was sent.
        answer_s: seconds that its answer may take after the first token, if that is not seen.
    """
    return PrefixSource(holder, 0, wait_s=silent_s, cold_s=max(LOST_LEAST_S, SLOWER * prompt_s) + answer_s)


def second_choice(
    excluded: frozenset[InstanceId], legs: tuple[InstanceId, ...], pulled: PrefixSource | None, *, hand_over: bool
) -> Choose:
    """Ask for a second prefill leg beside `legs`. `excluded`: instances that have failed the request.

    If the silent leg pulls (`pulled`), the source may be what stands still: the answer's instance should be another.
    And the leg's own instance may be well: it computes the prompt if there is no other.
    """
    others = excluded | {*legs}
    if pulled is None:
        return Choose(others, hand_over, second=True, holders=legs)
    source = frozenset({pulled.instance})
    return Choose(
        others | source, hand_over, second=True, holders=legs, otherwise=(others, excluded | source, excluded)
    )


def choice_instead(
    excluded: frozenset[InstanceId], at: InstanceId, pulled: PrefixSource, *, hand_over: bool, lost: bool
) -> Choose:
    """Ask for a leg in place of the answering one at `at`, which pulls and is silent. `excluded`: as above.

    The source may be what stands still, so it serves no part of the request. The leg's own instance may be well: it
    serves the request if there is no other. `lost`: the source is known to be lost.
    """
    others = excluded | {pulled.instance}
    return Choose(others | {at}, hand_over, second=True, otherwise=(others,), lost=lost, instead=True)


def in_one_piece(source: PrefixSource, answer_s: float) -> PrefixSource | None:
    """The source of an aggregated leg whose answer comes in one piece: the cold time includes the answer's longest time
    after its first token (`longest_s`), as that token is not seen. None: the cold time is not known, and the leg has no
    short turn.
    """
    return None if source.cold_s <= 0 else replace(source, cold_s=source.cold_s + answer_s)


def longest_s(tokens_max: int | None, tpot_ms: float) -> float | None:
    """Seconds that an answer in one piece may take after its first token; None: not known.

    Args:
        tokens_max: the answer's limit in tokens; None: it has none.
        tpot_ms: the expected time of each token after the first; 0: not known.
    """
    if tokens_max is None or (tokens_max > 1 and tpot_ms <= 0):
        return None
    return SLOWER * (tokens_max - 1) * tpot_ms / 1000
