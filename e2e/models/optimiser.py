"""Muon for the layers' matrices and Adam for the rest, over stacked parameters: few steps must go far on a CPU."""

from __future__ import annotations

import math

import torch
from tiny_llama import TinyLlama
from torch import Tensor, nn

MATRICES = ("attention_in", "attention_out", "mlp_in", "mlp_out")
MUON_MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)


def orthogonalise(update: Tensor, iterations: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices to ``update`` (..., rows, columns), by the Newton-Schulz iteration of Muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = update.shape[-2] > update.shape[-1]
    x: Tensor = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Learning rates are per step, since the schedule changes them. Muon: github.com/KellerJordan/Muon (MIT)."""

    def __init__(self, model: TinyLlama) -> None:
        named = dict(model.named_parameters())
        matrices = {name: named.pop(name) for name in MATRICES}
        self.matrices = list(matrices.values())
        self.part_rows = [model.shape.rows(name) for name in matrices]
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        self.others = list(named.values())
        self.adam = torch.optim.Adam(self.others, betas=ADAM_BETAS, eps=1e-10)

    @torch.no_grad()
    def step(self, muon_rate: float, adam_rate: float) -> None:
        """Apply the gradients, clipped to norm 1, and clear them."""
        nn.utils.clip_grad_norm_([*self.matrices, *self.others], 1.0)
        for matrix, momentum, part_rows in zip(self.matrices, self.momenta, self.part_rows, strict=True):
            gradient = matrix.grad
            assert gradient is not None
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            update = gradient.lerp(momentum, MUON_MOMENTUM)
            for part, part_update in zip(
                torch.split(matrix, part_rows, 1), torch.split(update, part_rows, 1), strict=True
            ):
                rate = muon_rate * math.sqrt(max(1.0, part.shape[1] / part.shape[2]))
                part.sub_(orthogonalise(part_update), alpha=rate)
            matrix.grad = None
        for group in self.adam.param_groups:
            group["lr"] = adam_rate
        self.adam.step()
        self.adam.zero_grad()


def schedule(step: int, steps: int, warm_up: int, cool_down: int) -> float:
    """Factor on the learning rates: linear warm-up, constant, linear cool-down to a twentieth."""
    return min(1.0, (step + 1) / warm_up, max(0.05, (steps - step) / cool_down))
