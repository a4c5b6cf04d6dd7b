"""What to do next, in sentences, from the figures of a report. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sixfold_runtime.report.model import Figures

WASTED_LIMIT, IDLE_UTILISATION = 0.65, 0.3
_CAUSES = {
    "padding": "batches mix lengths: add batching, or lower maxBatchTokens",
    "rejected_draft": "most drafts are rejected: draft fewer tokens, or name a draft that is closer to the model",
    "recomputed_prefix": "prompts begin alike and are computed again: add generation.kvCacheReuse",
    "unneeded_layers": "texts run through layers that change no label: add classification.earlyExit",
    "cancelled": "clients leave before their answers end: look at their time-outs and at gateway.requestTimeout",
}


def advice(figures: Figures) -> tuple[str, ...]:
    """The dearest first."""
    return tuple(_sentences(figures)) or ("Nothing stands out: the engines do little that nobody needs.",)


def _sentences(figures: Figures) -> Iterator[str]:
    for cause, share in figures.wasted_by_cause:
        if share >= 0.1 and cause in _CAUSES:
            yield f"{100 * share:.0f} % of all operations are wasted because {_CAUSES[cause]}."
    if figures.utilisation is not None and figures.utilisation < IDLE_UTILISATION:
        money = f", which cost {figures.idle_cost:,.2f}" if figures.idle_cost else ""
        yield (
            f"Pods that hold models compute {100 * figures.utilisation:.0f} % of the time: {figures.idle_hours:,.1f}"
            f" pod hours were idle{money}. Fewer or smaller pods would do."
        )
    below = [level for level in figures.levels if level.level in ("0", "1", "2") and level.requests > 0]
    top = sum(level.requests for level in figures.levels if level.level == "3")
    low = sum(level.requests for level in below)
    if low > top:
        yield "Most requests ran below level 3: see RolledBack of the policy, or raise rollbackLevel."
    if figures.failed_share and figures.failed_share > 0.01:
        yield f"{100 * figures.failed_share:.1f} % of the requests failed: look at the gateway's log by X-Request-ID."
