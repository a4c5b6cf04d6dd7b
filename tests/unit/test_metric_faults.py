"""What goes wrong between Prometheus and a decision: no kind of it lowers a level, and none brings one back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from control_life import INTERVAL_SECONDS, Life, sound

from sixfold_api.control_status import Verdict
from sixfold_operator.control.model import Reading, Snapshot

Garble = Callable[[Snapshot], Snapshot]


def each(change: Callable[[Reading], tuple[Reading, ...]]) -> Garble:
    """Every series changed."""

    def garbled(snapshot: Snapshot) -> Snapshot:
        readings = {
            name: tuple(new for old in found for new in change(old)) for name, found in snapshot.readings.items()
        }
        return replace(snapshot, readings=readings)

    return garbled


def unanswered(why: str) -> Garble:
    """No query is answered: what the collector makes of an error is in test_prometheus.py."""
    return lambda snapshot: Snapshot(snapshot.at, {}, dict.fromkeys(snapshot.readings, why), "PrometheusError", why)


FAULTS: dict[str, Garble] = {
    "nan": each(lambda reading: (replace(reading, value=math.nan),)),
    "plus-infinity": each(lambda reading: (replace(reading, value=math.inf),)),
    "minus-infinity": each(lambda reading: (replace(reading, value=-math.inf),)),
    "nan-samples": each(lambda reading: (replace(reading, samples=math.nan),)),
    "empty-answer": each(lambda _: ()),
    "no-answer-for-the-policy": lambda snapshot: replace(snapshot, readings={}),
    "two-series": each(lambda reading: (reading, replace(reading, value=reading.value + 1))),
    "few-samples": each(lambda reading: (replace(reading, samples=3.0),)),
    "status-500": unanswered("http://prometheus answers with status 500"),
    "time-out": unanswered("http://prometheus doesn't answer in time"),
    "one-query-fails": lambda snapshot: replace(snapshot, problems=dict.fromkeys(snapshot.readings, "status 422")),
    "stale": lambda snapshot: replace(snapshot, reason="Stale", message="older than 90 s"),
    "no-scrapes": lambda snapshot: replace(snapshot, reason="Missing", message="no sixfold_level"),
    "clock-of-prometheus-ahead": each(lambda old: (replace(old, unix_seconds=old.unix_seconds + 86400),)),
    "clock-of-prometheus-behind": each(lambda old: (replace(old, unix_seconds=old.unix_seconds - 86400),)),
}


@pytest.fixture(params=FAULTS.values(), ids=list(FAULTS))
def garble(request: pytest.FixtureRequest) -> Garble:
    found: Garble = request.param
    return found


def test_what_says_nothing_lowers_nothing(garble: Garble) -> None:
    """Also where the next breach would have."""
    life = Life().rest()
    life.faulty = lambda _: {"RequestP95", "ErrorRate", "AcceptanceRate", "ShadowDisagreement"}
    life.run(2 * INTERVAL_SECONDS)
    life.garbled = garble
    life.run(300)
    assert (life.level, life.downs, life.status.suspended) == (3, [], [])
    assert {item.verdict for item in life.decided.observed} == {Verdict.UNKNOWN}
    assert all(item.why for item in life.decided.observed)


def test_what_says_nothing_brings_nothing_back(garble: Garble) -> None:
    life = Life(analysis={"recoverAfter": "60s"}).rest()
    life.faulty = lambda _: {"RequestP95"}
    while not life.downs:
        life.run(INTERVAL_SECONDS)
    life.faulty, life.garbled = sound, garble
    life.run(300)
    assert life.level == 2
    life.garbled = lambda snapshot: snapshot
    life.run(150)
    assert life.level == 3, "it ends by itself"


@pytest.mark.parametrize("hours", [-24, 24], ids=["back", "ahead"])
def test_our_clock_that_jumps_moves_nothing(hours: int) -> None:
    """Neither lowers it, nor counts the hours in between as health."""
    life = Life(analysis={"recoverAfter": "1h"}).rest()
    life.now += timedelta(hours=hours)
    life.run(100)
    assert life.downs == []
    life.faulty = lambda _: {"RequestP95"}
    life.run(100)
    lowered = life.level
    assert lowered < 3
    life.faulty = sound
    life.run(100)
    life.now += timedelta(hours=hours)
    life.run(300)
    assert life.level == lowered


def test_a_signal_that_flaps_around_its_threshold_moves_nothing() -> None:
    """Two looks beyond it, one within: the third in a row never comes."""
    life = Life().rest()
    for _ in range(30):
        life.faulty = lambda _: {"ErrorRate"}
        life.garbled = lambda snapshot: snapshot
        life.run(INTERVAL_SECONDS)
        life.garbled = each(lambda reading: (replace(reading, value=0.0),))
        life.run(INTERVAL_SECONDS)
    assert life.downs == []
