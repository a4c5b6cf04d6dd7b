"""Rotary position embeddings (Su et al., arXiv 2104.09864) as complex factors, in fp32 whatever the weights are."""

from __future__ import annotations

import importlib
from typing import Any

import torch

STATIC_KINDS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of scaling whose frequencies don't depend on the length of the text."""
_FIRST_POSITIONS = 1024


class Rotary:
    """The factors that turn each pair of a head's components by its position."""

    def __init__(self, config: Any, head_dim: int, device: torch.device) -> None:
        """`config` is transformers' configuration of the model; its kind of scaling is one of STATIC_KINDS."""
        frequencies, self._scaling = _frequencies(config, head_dim)
        self._frequencies = frequencies.to(device)
        self._table = torch.empty(0, head_dim // 2, dtype=torch.complex64, device=device)

    def at(self, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """complex64 [tokens, head_dim / 2] for int64 positions [tokens], all below `longest`."""
        self._reach(longest)
        return self._table.index_select(0, positions)

    def between(self, start: int, end: int) -> torch.Tensor:
        """The same for the positions from `start` to before `end`; not to be written to."""
        self._reach(end)
        return self._table[start:end]

    def _reach(self, longest: int) -> None:
        if longest > len(self._table):
            count = max(_FIRST_POSITIONS, 1 << (longest - 1).bit_length())
            angles = torch.arange(count, device=self._frequencies.device).float()[:, None] * self._frequencies
            self._table = torch.complex(angles.cos() * self._scaling, angles.sin() * self._scaling)


def interleaved(head_dim: int) -> torch.Tensor:
    """int64 [head_dim]: the order of a head's components that puts the two of a pair side by side.

    Checkpoints hold component i beside i + head_dim / 2; a complex number wants its parts adjacent.
    """
    return torch.arange(head_dim).view(2, -1).t().reshape(-1)


def _frequencies(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    rope: Any = importlib.import_module("transformers.modeling_rope_utils")
    frequencies, scaling = rope.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return frequencies, float(scaling)
