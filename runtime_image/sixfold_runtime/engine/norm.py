"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467) with few operations."""

from __future__ import annotations

import math

import torch
from torch.nn import functional


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        """`weight` is [size], or [n, size] for n kinds of rows."""
        self._weight, self._eps, self._size = weight, eps, weight.shape[-1]
        self.weight_bytes = weight.nbytes
        self._by_hand = weight.dtype == torch.float32 and weight.device.type == "cpu"
        if self._by_hand:
            # x / sqrt(|x|^2 + size eps) * sqrt(size) weight: three operations instead of torch's six.
            self._floor = torch.tensor(math.sqrt(self._size * eps))
            self._weight = weight * math.sqrt(self._size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor like x."""
        if self._by_hand:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return torch.div(x, torch.hypot(length, self._floor)).mul_(self._weight)
        if self._weight.dim() == 1:
            return functional.rms_norm(x, (self._size,), self._weight, self._eps)
        return functional.rms_norm(x, (self._size,), None, self._eps) * self._weight
