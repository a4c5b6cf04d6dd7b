"""Which modes run, which levels differ, what was rejected, and what the arms get. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sixfold_api.control_status import Rejection, Suspension, TunedValue
from sixfold_api.modes import LEVEL_FROM, Mode
from sixfold_operator.control.model import State, View

AWAITS_CANARY = "Canary"
"""Reason of a suspension: the level already counts the mode, and the canary has yet to try it."""
MODES = tuple(Mode)


@dataclass(frozen=True)
class ArmInputs:
    """What `sixfold_api.effective.effective` needs of one arm beside the spec.

    Attributes:
        suspended: modes that are off in this arm, with the reasons, for people.
    """

    target: int
    suspended: Mapping[Mode, str]
    tuned: tuple[TunedValue, ...] = ()


def effective_inputs(state: State, view: View) -> tuple[ArmInputs, ArmInputs | None]:
    """What the stable arm runs, and what the canary runs; None where there is no canary.

    A mode on trial stays suspended in the stable arm. A tuned value on trial replaces the one at its path.
    """
    suspended = {entry.mode: suspension_text(entry) for entry in state.suspended}
    stable = ArmInputs(target(state, view), suspended, state.tuned)
    canary = state.canary
    if canary is None:
        return stable, None
    if canary.mode is not None:
        others = {mode: why for mode, why in suspended.items() if mode is not canary.mode}
        return stable, ArmInputs(stable.target, others, state.tuned)
    if canary.tuned is None:
        return stable, None
    return stable, ArmInputs(stable.target, suspended, with_tuned(state.tuned, canary.tuned))


def suspension_text(entry: Suspension) -> str:
    return "its canary comes first" if entry.reason == AWAITS_CANARY else f"{entry.reason}, since {entry.since}"


def with_tuned(held: Iterable[TunedValue], new: TunedValue) -> tuple[TunedValue, ...]:
    """Tuned values with one more, in place of that at its path."""
    return (*(entry for entry in held if entry.path != new.path), new)


def target(state: State, view: View) -> int:
    """The level of the stable arm; the ceiling before the first decision."""
    return view.ceiling if state.level is None else max(0, min(state.level.target, view.ceiling))


def modes_at(level: int, view: View) -> frozenset[Mode]:
    return frozenset(mode for mode in view.modes if LEVEL_FROM[mode] <= level)


def active_modes(state: State, view: View) -> frozenset[Mode]:
    """What runs for all requests."""
    return modes_at(target(state, view), view) - {entry.mode for entry in state.suspended}


def useful_levels(view: View) -> tuple[int, ...]:
    """Levels that turn something on which those below don't, ascending; 0 always among them, none above the ceiling."""
    on = {LEVEL_FROM[mode] for mode in view.modes}
    levels = [0]
    for level in sorted(set(view.levels)):
        if level <= view.ceiling and any(levels[-1] < start <= level for start in on):
            levels.append(level)
    return tuple(levels)


def running_level(state: State, view: View) -> int:
    """The lowest level at which no mode that runs now would be missing: what a breach is about."""
    return max((LEVEL_FROM[mode] for mode in active_modes(state, view)), default=0)


def level_below(state: State, view: View) -> int | None:
    """The next level down that turns something off; None where nothing is on."""
    running = running_level(state, view)
    return max((level for level in useful_levels(view) if level < running), default=None)


def level_above(state: State, view: View) -> int | None:
    """The next useful level up; None at the top, and where it was rejected: higher ones would run what it ran.

    A level with nothing above it that differs counts as the ceiling.
    """
    above = [level for level in useful_levels(view) if level > target(state, view)]
    if not above:
        return None
    up = above[0] if len(above) > 1 else view.ceiling
    is_blocked = any(entry.level is not None and entry.level <= up for entry in rejections(state, view))
    return None if is_blocked else up


def rejections(state: State, view: View) -> tuple[Rejection, ...]:
    """Those that hold for this spec."""
    entries = () if state.level is None else state.level.rejected
    return tuple(entry for entry in entries if entry.spec_hash == view.spec_hash)


def is_rejected(mode: Mode, state: State, view: View) -> bool:
    return any(entry.mode is mode for entry in rejections(state, view))


def awaiting_canary(state: State, view: View) -> tuple[Mode, ...]:
    """Modes that the level counts and that the canary has yet to try, in the order of trying."""
    waiting = {entry.mode for entry in state.suspended if entry.reason == AWAITS_CANARY}
    wanted = waiting & modes_at(target(state, view), view)
    return tuple(mode for mode in in_order(wanted) if not is_rejected(mode, state, view))


def in_order(modes: Iterable[Mode]) -> list[Mode]:
    """By the level from which they are on."""
    return sorted(modes, key=lambda mode: (LEVEL_FROM[mode], MODES.index(mode)))
