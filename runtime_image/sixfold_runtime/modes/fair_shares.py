"""Who got how much: shares of engines that tenants and priorities are owed. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens, as in the virtual token counter of Sheng et al.
(arXiv 2401.00588): a tenant's counter grows with the tokens that it gets, and one that comes back starts where those
that wait are, so that nobody saves up a claim or pays for a time when nobody else was there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from sixfold_api.gateway import Priority

Flow = tuple[str, Priority]
"""A tenant's requests of one priority."""
WEIGHTS = {Priority.HIGH: 8.0, Priority.NORMAL: 1.0, Priority.LOW: 0.125}
"""Under lasting overload each priority gets eight times as much as the next: High is soon, Low isn't never."""


class Shares(Mapping[Flow, float]):
    """Virtual tokens that each flow got; one that is unknown stands where the others are."""

    def __init__(self) -> None:
        self._got: dict[Flow, float] = {}
        self._now = 0.0

    def __getitem__(self, flow: Flow) -> float:
        return max(self._now, self._got.get(flow, 0.0))

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._got)

    def __len__(self) -> int:
        return len(self._got)

    def charge(self, flow: Flow, tokens: int) -> None:
        """A request of this flow goes to an engine."""
        self._got[flow] = self[flow] + tokens / WEIGHTS[flow[1]]

    def follow(self, waiting: Collection[Flow]) -> None:
        """These wait now, before anything is sent: time goes on to the one that got least."""
        if waiting:
            self._now = max(self._now, min(self[flow] for flow in waiting))
            self._got = {flow: got for flow, got in self._got.items() if got > self._now}


def displaced(waiting: Sequence[Flow], arriving: Flow) -> int | None:
    """Which request, as an index, makes room for an arriving one in a full queue; None: that one gets none.

    The tenant that has most in the queue, the arriving request included, gives up the one that came last of its lowest
    priority.

    Args:
        waiting: in the order in which they came.
    """
    flows = [*waiting, arriving]
    counts = Counter(tenant for tenant, _ in flows)
    most = max(counts.values())
    tenant = arriving[0] if counts[arriving[0]] == most else next(name for name, n in counts.items() if n == most)
    candidates = [index for index, flow in enumerate(flows) if flow[0] == tenant]
    index = min(candidates, key=lambda index: (flows[index][1].rank, -index))
    return None if index == len(waiting) else index
