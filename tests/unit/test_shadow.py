"""Which answers are computed again, and which are given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sixfold_runtime.modes.shadow import Backlog, is_sampled

IDS = [f"cls-{number:024x}" for number in range(4000)]


def test_the_sampled_share_is_the_rate() -> None:
    for rate in (0.0, 0.01, 0.5, 1.0):
        share = sum(is_sampled(name, rate) for name in IDS) / len(IDS)
        assert abs(share - rate) < 4 * (rate * (1 - rate) / len(IDS)) ** 0.5 + 1e-12


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_what_is_sampled_stays_so_at_every_rate_above(name: str, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert is_sampled(name, low) <= is_sampled(name, high)
    assert is_sampled(name, low) == is_sampled(name, low)


@given(st.lists(st.integers(0, 3)), st.integers(1, 5))
def test_a_full_backlog_gives_up_the_oldest(steps: list[int], most: int) -> None:
    backlog: Backlog[int] = Backlog(most)
    kept: list[int] = []
    for number, step in enumerate(steps):
        if step == 0:
            assert backlog.take() == (kept.pop(0) if kept else None)
            continue
        dropped = backlog.add(number)
        kept.append(number)
        assert dropped == (kept.pop(0) if len(kept) > most else None)
        assert len(backlog) == len(kept) <= most
