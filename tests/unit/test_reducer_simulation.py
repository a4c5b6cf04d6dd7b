"""1,000 hours of noisy metrics: no flap beyond the bound, no change without a fault, every fault caught in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from control_simulation import TIMING, simulate


def test_a_thousand_hours_of_noise() -> None:
    begun = time.process_time()
    figures = simulate(hours=1000, seed=6)
    seconds = time.process_time() - begun
    print(
        f"\n{figures.hours} simulated hours, {figures.ticks} looks, {figures.unknown} unknown verdicts,"
        f" {figures.outages} outages, {figures.spikes} spikes, {figures.restarts} restarts of the operator"
        f"\n{figures.faults} true faults: {figures.caught} caught, {figures.over_before_seen} over before"
        f" enough was seen, {len(figures.missed)} missed"
        f"\nworst: {figures.worst_looks} breaching looks of failureLimit {TIMING.failure_limit};"
        f" where a cooldown ran, {figures.worst_cooldown_seconds:.0f} s more (cooldown {TIMING.cooldown:.0f} s)"
        f"\n{figures.downs} changes down, {figures.ups} up, {figures.rejected} rejections,"
        f" {len(figures.false_changes)} without a fault,"
        f" {len(figures.flaps)} flaps beyond the bound; {seconds:.1f} s of CPU"
    )
    assert figures.flaps == []
    assert figures.false_changes == []
    assert figures.missed == []
    assert figures.worst_looks <= TIMING.failure_limit
    assert figures.worst_cooldown_seconds <= TIMING.cooldown
    assert figures.caught + figures.over_before_seen == figures.faults
    assert figures.caught > 100
