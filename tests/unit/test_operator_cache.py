"""What counts as news: every change of somebody else wakes, a write of ours alone doesn't."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sixfold_operator.cache import Cache


def policy(version: int, level: int, target: int) -> dict[str, Any]:
    return {
        "kind": "InferencePolicy",
        "metadata": {"namespace": "n", "name": "p", "uid": "u", "resourceVersion": str(version)},
        "spec": {"rollbackLevel": level},
        "status": {"level": {"target": target}},
    }


def test_a_status_write_of_ours_wakes_nobody() -> None:
    cache = Cache()
    assert cache.put(policy(1, level=3, target=0))
    assert not cache.put(policy(2, level=3, target=3), written=("status",))
    assert not cache.put(policy(2, level=3, target=3))


def test_a_patch_that_our_status_write_brought_along_wakes_once() -> None:
    cache = Cache()
    cache.put(policy(1, level=3, target=3))
    cache.put(policy(3, level=0, target=3), written=("status",))  # a human's patch was version 2
    assert cache.put(policy(2, level=0, target=3))
    assert not cache.put(policy(3, level=0, target=3))


@given(st.lists(st.sampled_from(["human", "ours"]), min_size=1), st.data())
def test_no_change_of_somebody_else_is_lost(writers: list[str], data: st.DataObject) -> None:
    """Whatever order writes, answers and (merged) events come in, the last human change is acted upon."""
    cache, acted_on = Cache(), None
    level, events = 0, [policy(0, 0, 0)]
    cache.put(events[0])
    delivered = 1
    for version, writer in enumerate(writers, 1):
        level += writer == "human"
        events.append(policy(version, level, version))
        if writer == "ours":
            cache.put(events[-1], written=("status",))
        if data.draw(st.booleans()):  # the watch catches up; what it skips in between was merged by the client
            delivered = data.draw(st.integers(delivered, len(events)))
            if cache.put(events[delivered - 1]):
                acted_on = cache.get("InferencePolicy", "n", "p")
    if cache.put(events[-1]):
        acted_on = cache.get("InferencePolicy", "n", "p")
    assert (acted_on["spec"]["rollbackLevel"] if acted_on else 0) == level
