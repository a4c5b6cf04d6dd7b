"""Which precision each linear gets, and which linears get more when the budget is missed. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sixfold_api.precision import Precision
from sixfold_runtime.prepare.failures import PreparationError, Reason

DEFAULT_BITS = 4
DEFAULT_GROUP_SIZE = 128
DEFAULT_DAMP_PERCENT = 0.01
MOST_BITS = 8
ROUNDS = (("worst quarter", 0.25), ("worst half", 0.5), ("all", 1.0))
"""What gets more bits when the precision that was asked for misses the budget, one round after the other."""
_PACKED = 32
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears with one input, which the engine computes in one call if their precision is one."""


@dataclass(frozen=True)
class LinearShape:
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Grid:
    """GPTQ of one linear: bits, and input channels that share a scale (-1: all)."""

    bits: int
    group_size: int


Plan = Mapping[str, Grid | None]
"""Linear by name -> its grid, None for full precision."""


def linear_shapes(model: Any) -> dict[str, LinearShape]:
    """The linears of a transformers model that may be quantised: those inside of its stacked layers.

    Embeddings, the output head and a classifier's head stay as they are.
    """
    import torch

    return {
        name: LinearShape(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(r"\.\d+\.", name)
    }


def gptq_plan(linears: Mapping[str, LinearShape], precision: Precision) -> dict[str, Grid | None]:
    """The grid of every linear.

    Raises PreparationError(UnsupportedPrecision) for a grid that doesn't divide a linear, or an override that
    matches nothing.
    """
    for override in precision.modules:
        if not any(_matches(override.match, name) for name in linears):
            raise PreparationError(
                Reason.UNSUPPORTED_PRECISION,
                f"precision.modules: {override.match!r} matches no linear of the model; it has, for instance, "
                f"{', '.join(list(linears)[:7])}",
            )
    if not linears:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION, "the model has no linear layers that could be quantised: use scheme: None"
        )
    plan = {name: _grid(name, precision) for name in linears}
    for name, grid in plan.items():
        _require_divides(name, linears[name], grid)
    if not any(plan.values()):
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION, "precision leaves every linear in full precision: use scheme: None"
        )
    return plan


def _grid(name: str, precision: Precision) -> Grid | None:
    asked = Grid(precision.bits or DEFAULT_BITS, precision.group_size or DEFAULT_GROUP_SIZE)
    for override in precision.modules:
        if _matches(override.match, name):
            if override.full:
                return None
            return Grid(override.bits or asked.bits, override.group_size or asked.group_size)
    return asked


def _matches(pattern: str, name: str) -> bool:
    """A whole name or the end of one, from a dot on; `*` stands for anything."""
    expression = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(rf"(?:.*\.)?{expression}", name) is not None


def _require_divides(name: str, shape: LinearShape, grid: Grid | None) -> None:
    if grid is None:
        return
    if grid.group_size > 0 and shape.inputs % grid.group_size:
        fitting = [size for size in (1024, 512, 256, 128, 64, 32) if shape.inputs % size == 0]
        advice = f"use {fitting[0]} or a smaller one" if fitting else "leave it in full precision (full: true)"
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            f"groups of {grid.group_size} don't divide the {shape.inputs} inputs of {name}: {advice}, "
            "for all or in precision.modules",
        )
    if shape.inputs % _PACKED or shape.outputs % _PACKED:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            f"{name} has {shape.inputs} inputs and {shape.outputs} outputs, and GPTQ packs {_PACKED} at a time: "
            f"leave it in full precision with precision.modules: [{{match: {name}, full: true}}]",
        )


def widened(plan: Plan) -> dict[str, Grid | None]:
    """Every linear at the most bits."""
    return {name: None if grid is None else replace(grid, bits=MOST_BITS) for name, grid in plan.items()}


def worst(losses: Mapping[str, float], share: float) -> set[str]:
    """The share of linears that lose most; those that are computed in one call count together, by their worst."""
    calls: dict[tuple[str, int], list[str]] = {}
    for name in losses:
        calls.setdefault(_call(name), []).append(name)
    ranked = sorted(calls.values(), key=lambda names: -max(losses[name] for name in names))
    chosen: set[str] = set()
    for names in ranked:
        if len(chosen) >= share * len(losses):
            break
        chosen.update(names)
    return chosen


def _call(name: str) -> tuple[str, int]:
    parent, _, own = name.rpartition(".")
    for index, together in enumerate(_TOGETHER):
        if own in together:
            return parent, index
    return name, -1


def describe(plan: Plan) -> str:
    """Such as `126 linears at 4 bits, 42 at 8 bits`."""
    counts: dict[str, int] = {}
    for grid in plan.values():
        key = "in full precision" if grid is None else f"at {grid.bits} bits"
        counts[key] = counts.get(key, 0) + 1
    return ", ".join(f"{count} linears {key}" for key, count in sorted(counts.items()))


def dynamic(plan: Plan, base: Grid) -> dict[str, dict[str, int]]:
    """GPTQModel's and vLLM's per-module overrides of a base grid; `-:` leaves a module as it is."""
    overrides: dict[str, dict[str, int]] = {}
    for name, grid in plan.items():
        if grid is None:
            overrides[f"-:^{re.escape(name)}$"] = {}
        elif grid != base:
            overrides[f"+:^{re.escape(name)}$"] = {"bits": grid.bits, "group_size": grid.group_size}
    return overrides


def base_grid(plan: Plan) -> Grid:
    """The grid of most linears."""
    grids: Sequence[Grid] = [grid for grid in plan.values() if grid is not None]
    return max(set(grids), key=grids.count)
