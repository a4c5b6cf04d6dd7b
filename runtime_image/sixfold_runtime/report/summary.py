"""The figures in a few sentences, for whoever pays the bill. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sixfold_runtime.report.model import Figures
from sixfold_runtime.report.words import duration, hours, money, percent

HOURS_A_MONTH = 730
LEAST_HOURS_TO_PROJECT = 0.25
FAILED_LIMIT = 0.01
CAUSES = {
    "padding": "padding",
    "rejected_draft": "rejected drafts",
    "recomputed_prefix": "prompts that begin alike and were computed again",
    "unneeded_layers": "layers that changed no label",
    "cancelled": "answers that nobody waited for",
}


def summary(figures: Figures) -> tuple[str, ...]:
    return tuple(_sentences(figures))


def _sentences(figures: Figures) -> Iterator[str]:
    served = (
        f"{figures.requests:,.0f} request{'' if figures.requests == 1 else 's'} in {duration(3600 * figures.hours)}"
    )
    yield from _bill(figures, served)
    if figures.saved_share is not None:
        more = "less" if figures.saved_share >= 0 else "more"
        sentence = (
            f"With the modes that were on, requests took {percent(abs(figures.saved_share))} {more} engine time than"
            " requests of the same length without them"
        )
        if figures.saved is not None:
            verb = "saved" if figures.saved_share >= 0 else "cost"
            sentence += f": that {verb} {money(abs(figures.saved))}"
        yield sentence + "."
    if figures.wasted_share is not None and figures.wasted_by_cause:
        cost = sum(amount for _, amount in figures.wasted_cost_by_cause)
        worth = f", worth about {money(cost)}" if cost else ""
        cause = CAUSES.get(figures.wasted_by_cause[0][0], figures.wasted_by_cause[0][0])
        yield f"{percent(figures.wasted_share)} of the computing bought nothing{worth}; most of that: {cause}."
    if figures.failed_share > FAILED_LIMIT:
        yield f"{percent(figures.failed_share)} of the requests failed."


def _bill(figures: Figures, served: str) -> Iterator[str]:
    total = figures.cost if figures.bill is None else figures.bill
    if figures.bill is not None and figures.bill_per_request is not None:
        idle = figures.idle_cost or 0.0
        yield (
            f"{served} cost {money(figures.bill)}: {money(figures.bill - idle)} while pods computed, and"
            f" {money(idle)} while they waited. That is {money(1000 * figures.bill_per_request)} a thousand"
            " requests."
        )
    elif figures.cost is not None and figures.cost_per_request is not None:
        yield (
            f"{served} took engine time for {money(figures.cost)}: {money(1000 * figures.cost_per_request)} a thousand"
            " requests. What pods cost while they waited isn't known here."
        )
    elif figures.engine_hours is not None:
        yield f"{served} took {hours(figures.engine_hours)} of engine time. What an hour costs isn't known."
    else:
        yield f"{served}. What they took isn't known."
    if total is not None and figures.hours >= LEAST_HOURS_TO_PROJECT:
        yield f"If all hours were like these, a month would cost about {money(total / figures.hours * HOURS_A_MONTH)}."
