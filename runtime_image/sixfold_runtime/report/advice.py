"""What to do next, in sentences, from the figures of a report. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sixfold_runtime.report.model import Figures
from sixfold_runtime.report.words import hours, money, percent

WORTH_SAYING, IDLE_UTILISATION, UNUSED_ROOM = 0.1, 0.3, 0.5
_CAUSES = {
    "padding": "batches mix lengths: add batching, or lower maxBatchTokens",
    "rejected_draft": "most drafts are rejected: draft fewer tokens, or name a draft that is closer to the model",
    "recomputed_prefix": "prompts begin alike and are computed again: add generation.kvCacheReuse",
    "unneeded_layers": "texts run through layers that change no label: add classification.earlyExit",
    "cancelled": "clients leave before their answers end: look at their time-outs and at gateway.requestTimeout",
}


def advice(figures: Figures) -> tuple[str, ...]:
    """The dearest first; what has no price comes last."""
    found = sorted(_weighed(figures), key=lambda entry: -entry[0])
    return tuple(text for _, text in found) or ("Nothing stands out: the engines do little that nobody needs.",)


def _weighed(figures: Figures) -> Iterator[tuple[float, str]]:
    """(money, sentence)."""
    costs = dict(figures.wasted_cost_by_cause)
    for cause, share in figures.wasted_by_cause:
        if share >= WORTH_SAYING and cause in _CAUSES:
            amount = costs.get(cause, 0.0)
            worth = f" (about {money(amount)})" if amount else ""
            yield amount, f"{percent(share)} of all operations{worth} are wasted because {_CAUSES[cause]}."
    if figures.utilisation is not None and figures.idle_hours and figures.utilisation < IDLE_UTILISATION:
        amount = figures.idle_cost or 0.0
        cost = f", which cost {money(amount)}" if amount else ""
        yield (
            amount,
            f"Pods that hold models compute {percent(figures.utilisation)} of the time: {hours(figures.idle_hours)} of"
            f" pods were idle{cost}. Fewer or smaller pods would do, or autoscaling with a lower minimum.",
        )
    below = sum(level.requests for level in figures.levels if level.level in ("0", "1", "2"))
    if below > sum(level.requests for level in figures.levels if level.level == "3"):
        yield 0.0, "Most requests ran below level 3: see RolledBack of the policy, or raise rollbackLevel."
    if figures.failed_share > 0.01:
        yield 0.0, f"{percent(figures.failed_share)} of the requests failed: look at the gateway's log by X-Request-ID."
    rooms = [room for room in figures.memory if room.unused_share >= UNUSED_ROOM]
    if rooms:
        room = max(rooms, key=lambda one: one.reserved_bytes - one.used_bytes)
        yield (
            0.0,
            f"{percent(room.unused_share)} of the memory that {room.variant} reserves for keys and values holds"
            " nothing: more requests would fit, or a smaller accelerator.",
        )
