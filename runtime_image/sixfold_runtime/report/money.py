"""What engine time and pods cost, and what levels saved. Pure.

A pod costs what its policy says, by component: a classifier with pods of its own has a price of its own. Requests cost
their engine time at that price; what pods cost beyond that is idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from sixfold_runtime.report.model import CLASSIFIER, ENGINE, Counted, Held, Place, Spent, Work
from sixfold_runtime.report.parts import Capacity, ColumnHours, LevelCost

HOUR_SECONDS = 3600
CLASSIFICATIONS = ("Classification", "TokenClassification")
PLAIN = "0"
LEAST_PLAIN_REQUESTS = 5
"""Of one length at level 0: a mean of fewer says little."""


def place_of(counted: Counted, policy: str, variant: str) -> Place:
    """Which pods serve a variant: a classifier's own, where the policy has such, else the engine's."""
    is_classifier = counted.tasks.get(variant) in CLASSIFICATIONS and is_split(counted, policy)
    return Place(policy, CLASSIFIER if is_classifier else ENGINE)


def is_split(counted: Counted, policy: str) -> bool:
    """The policy has classifier pods of their own."""
    return policy in counted.split_policies or Place(policy, CLASSIFIER) in counted.prices


def price(counted: Counted, place: Place) -> float | None:
    """Of a pod hour; None where nobody said it."""
    return counted.prices.get(place, counted.price_elsewhere)


def cost(counted: Counted, place: Place, seconds: float) -> float | None:
    per_hour = price(counted, place)
    return None if per_hour is None else seconds / HOUR_SECONDS * per_hour


def total(parts: Iterable[float | None]) -> float | None:
    """None where a part isn't known, or there are none: half a sum would be taken for the whole."""
    known = list(parts)
    return None if not known or None in known else sum(part for part in known if part is not None)


def work_cost(counted: Counted, work: Work) -> float | None:
    """What requests of a kind cost."""
    return cost(counted, place_of(counted, work.policy, work.variant), counted.spent[work].seconds)


def levels(counted: Counted) -> Iterator[LevelCost]:
    """Each level of each variant, and what it saved against level 0, requests of one length compared with their like.

    The gateway counts a request under the variant that was asked for, whichever weights answered, so that level 0 of
    a variant is there under the same name.
    """
    by_length: dict[tuple[str, str, str], dict[str, Spent]] = defaultdict(dict)
    for work, spent in counted.spent.items():
        if spent.requests > 0:
            by_length[work.policy, work.variant, work.level][work.length_bucket] = spent
    for (policy, variant, level), lengths in sorted(by_length.items()):
        number = sum(spent.requests for spent in lengths.values())
        seconds = sum(spent.seconds for spent in lengths.values())
        plain = {} if level == PLAIN else by_length.get((policy, variant, PLAIN), {})
        alike, took, would_take = _compared(lengths, plain)
        place = place_of(counted, policy, variant)
        yield LevelCost(
            policy=policy,
            variant=variant,
            level=level,
            requests=number,
            engine_ms=1000 * seconds / number,
            engine_hours=seconds / HOUR_SECONDS,
            cost=cost(counted, place, seconds),
            saved_share=1 - took / would_take if would_take > 0 else None,
            saved=cost(counted, place, would_take - took) if would_take > 0 else None,
            compared_share=alike / number,
        )


def _compared(lengths: dict[str, Spent], plain: dict[str, Spent]) -> tuple[float, float, float]:
    """Requests that have their like at level 0, the engine seconds they took, and those they would take there."""
    alike = took = would_take = 0.0
    for bucket, spent in lengths.items():
        like = plain.get(bucket)
        if like is not None and like.requests >= LEAST_PLAIN_REQUESTS:
            alike += spent.requests
            took += spent.seconds
            would_take += spent.requests * like.seconds / like.requests
    return alike, took, would_take


def saved(found: Iterable[LevelCost]) -> tuple[float | None, float | None]:
    """(money, share of the engine time at level 0) over all requests that could be compared."""
    compared = [level for level in found if level.saved_share is not None and level.saved_share < 1]
    amount = total(level.saved for level in compared)
    took = sum(level.engine_hours * level.compared_share for level in compared)
    plain = sum(level.engine_hours * level.compared_share / (1 - (level.saved_share or 0.0)) for level in compared)
    return amount, 1 - took / plain if plain > 0 else None


def capacity(counted: Counted) -> tuple[Capacity, ...]:
    """Pods by policy and component; nothing where their hours aren't known."""
    places: dict[Place, Held] = defaultdict(Held)
    for (place, _), held in (counted.pods or {}).items():
        places[place].up_seconds += held.up_seconds
        places[place].busy_seconds += held.busy_seconds
    return tuple(
        Capacity(
            policy=place.policy,
            component=place.component,
            price=price(counted, place),
            pod_hours=held.up_seconds / HOUR_SECONDS,
            busy_hours=held.busy_seconds / HOUR_SECONDS,
            idle_hours=_idle(held) / HOUR_SECONDS,
            cost=cost(counted, place, held.up_seconds),
            idle_cost=cost(counted, place, _idle(held)),
        )
        for place, held in sorted(places.items())
    )


def capacity_by_column(counted: Counted) -> tuple[ColumnHours, ...]:
    """Pods of all policies, by column of time."""
    columns: dict[int, Held] = defaultdict(Held)
    for (_, column), held in (counted.pods or {}).items():
        columns[column].up_seconds += held.up_seconds
        columns[column].busy_seconds += held.busy_seconds
    return tuple(
        ColumnHours(
            column, held.up_seconds / HOUR_SECONDS, held.busy_seconds / HOUR_SECONDS, _idle(held) / HOUR_SECONDS
        )
        for column, held in sorted(columns.items())
    )


def _idle(held: Held) -> float:
    return max(0.0, held.up_seconds - held.busy_seconds)


def wasted_costs(counted: Counted) -> tuple[tuple[str, float], ...]:
    """Cause -> money: its share of the operations, of what computing cost: the time in which pods computed or, where
    that isn't known, the engine time of requests. An estimate: operations stand for time. Nothing where a price isn't
    known."""
    flops: dict[Place, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (policy, variant, cause), number in counted.flops.items():
        flops[place_of(counted, policy, variant)][cause] += number
    seconds: dict[Place, float] = defaultdict(float)
    for (place, _), held in (counted.pods or {}).items():
        seconds[place] += held.busy_seconds
    if not counted.pods:
        for work, spent in counted.spent.items():
            seconds[place_of(counted, work.policy, work.variant)] += spent.seconds
    amounts: dict[str, float] = defaultdict(float)
    for place, causes in flops.items():
        computing, operations = cost(counted, place, seconds[place]), sum(causes.values())
        if computing is None:
            return ()
        for cause, number in causes.items():
            if cause and operations > 0:
                amounts[cause] += computing * number / operations
    return tuple(sorted(((cause, amount) for cause, amount in amounts.items() if amount > 0), key=lambda one: -one[1]))
