"""Tokens of one batch whose rows have different task slices: each group computes its own feed-forward parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from sixfold_runtime.engine.mlp import Mlp
from sixfold_runtime.engine.task_slice import TaskSlice

_Place = slice | torch.Tensor
"""Of tokens among the packed ones: a range where they lie together, else int64 indices."""


class TokenGroups:
    """Of the packed tokens of a step; embeddings, attention and normalisations don't ask for it."""

    def __init__(self, slices: Sequence[TaskSlice | None], counts: Sequence[int], device: torch.device) -> None:
        """
        Args:
            slices: of each row, in the order of the packed tokens.
            counts: tokens of each row.
        """
        self._device = device
        self._ranges: dict[TaskSlice | None, list[tuple[int, int]]] = {}
        first = 0
        for own, count in zip(slices, counts, strict=True):
            ranges = self._ranges.setdefault(own, [])
            if ranges and ranges[-1][1] == first:
                ranges[-1] = ranges[-1][0], first + count
            else:
                ranges.append((first, first + count))
            first += count
        self._slices = [own for own in self._ranges if own is not None]
        self._places: dict[frozenset[TaskSlice | None], _Place] = {}

    def touch(self, layer: int) -> bool:
        """Whether any token computes a layer otherwise than the trunk does."""
        return any(layer in own.layers for own in self._slices)

    def feed_forward(self, layer: int, x: torch.Tensor, base: Mlp) -> torch.Tensor:
        """What each token's own feed-forward part and adapter make of it.

        Args:
            x: [tokens, width], normalised; stays as it is.
            base: the trunk's own part.

        Returns:
            [tokens, width], before the residual.
        """
        parts = {own: own.layers[layer] for own in self._slices if layer in own.layers}
        replaced = {own: part.mlp for own, part in parts.items() if part.mlp is not None}
        z = self._replaced(x, base, replaced) if replaced else base(x)
        for own, part in parts.items():
            if part.adapter is not None:
                place = self._place([own])
                _put(z, place, part.adapter(_take(z, place)))
        return z

    def _replaced(self, x: torch.Tensor, base: Mlp, replaced: dict[TaskSlice, Mlp]) -> torch.Tensor:
        rest = [own for own in self._ranges if own not in replaced]
        if not rest and len(replaced) == 1:
            return next(iter(replaced.values()))(x)
        z = torch.empty_like(x)
        groups: list[tuple[Iterable[TaskSlice | None], Mlp]] = [([own], mlp) for own, mlp in replaced.items()]
        if rest:
            groups.append((rest, base))
        for members, mlp in groups:
            place = self._place(members)
            _put(z, place, mlp(_take(x, place)))
        return z

    def _place(self, members: Iterable[TaskSlice | None]) -> _Place:
        key = frozenset(members)
        if key not in self._places:
            ranges = sorted(part for member in key for part in self._ranges[member])
            first, last = ranges[0][0], ranges[-1][1]
            if last - first == sum(end - start for start, end in ranges):
                self._places[key] = slice(first, last)
            else:
                tokens = [token for start, end in ranges for token in range(start, end)]
                self._places[key] = torch.tensor(tokens, device=self._device)
        return self._places[key]


def _take(x: torch.Tensor, place: _Place) -> torch.Tensor:
    return x[place] if isinstance(place, slice) else x.index_select(0, place)


def _put(z: torch.Tensor, place: _Place, values: torch.Tensor) -> None:
    if isinstance(place, slice):
        z[place] = values  # a part that worked in place has nothing to copy
    else:
        z.index_copy_(0, place, values)
