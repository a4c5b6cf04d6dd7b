"""Train one exit head on cached features: regularised logistic regression with cross-validated temperatures.

Features are standardised, and that is folded into the weights, so that a head is one linear layer over raw features.
The loss is the cross entropy to the labels, mixed with that to the full model's answer as far as distillation is asked
for, plus `ridge` times the squared weights; L-BFGS minimises it. Three folds of the training text, each judged by a
head that didn't see it, choose the ridge, and teach what can't be read from text that the head learned from: the
temperature (Guo et al., arXiv 1706.04599) and how much surer of the full model's label than of the right one a
confidence makes (`sharpness`). A model that was tuned on the same text is too sure of all of it, so that temperatures
are fitted anew on text that nothing learned from where there is enough (`recalibrated`). The same text gives the same
heads on one device and number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from sixfold_runtime.prepare.failures import PreparationError, Reason

DEFAULT_EPOCHS = 100
"""Passes over the cached features, at most."""
FOLDS = 3
RIDGES = (0.1, 0.01)
"""From strong to weak: each begins where the one before ended."""
_TEMPERATURES = (0.05, 20.0)
_SHARPNESS = (0.1, 10.0)
_SEARCH_STEPS = 50
_GOLDEN = (math.sqrt(5) - 1) / 2
_HISTORY = 10
_SEED = 0
_GRADIENT, _CHANGE = 1e-4, 1e-6
"""Where the descent ends before its passes do."""


@dataclass(frozen=True)
class TrainedHead:
    """A head behind one depth.

    Attributes:
        weight, bias: float32 [labels, features] and [labels], for raw features.
        temperature: what logits are divided by.
        sharpness: logit(probability that its label is the full model's) / logit(confidence).
        ridge: the regularisation that cross-validation chose.
        agreement: share of training texts for which it gives the full model's label, cross-validated.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    temperature: float
    sharpness: float
    ridge: float
    agreement: float


def train(
    features: torch.Tensor, labels: torch.Tensor, full_logits: torch.Tensor, distillation: float, epochs: int
) -> TrainedHead:
    """
    Args:
        features: float32 [texts, features], on the device to compute on; overwritten.
        labels: int64 [texts].
        full_logits: float32 [texts, labels], the full model's.
        distillation: share of the loss that comes from the full model's answer, 0 to 1.

    Raises PreparationError(UnusableTraining): a weight is not finite.
    """
    labels, full_logits = labels.to(features.device), full_logits.to(features.device)
    own = functional.one_hot(labels, full_logits.shape[1]).float()
    targets = (1 - distillation) * own + distillation * full_logits.softmax(dim=1)
    mean, scale = features.mean(dim=0), features.std(dim=0)
    scale = torch.where(scale > 1e-6 * scale.max().clamp_min(1e-30), scale, torch.inf)  # constant ones tell nothing
    features.sub_(mean).div_(scale)
    ridge, logits = _cross_validated(features, targets, _folds(labels), epochs)
    weight, bias = _Fit(features, targets).to(RIDGES[: RIDGES.index(ridge) + 1], epochs)[-1]
    temperature = fit_temperature(logits, labels)
    agrees = logits.argmax(dim=1) == full_logits.argmax(dim=1)
    confidences = (logits / temperature).softmax(dim=1).amax(dim=1)
    raw = weight / scale
    return TrainedHead(
        weight=raw.cpu(),
        bias=(bias - raw @ mean).cpu(),
        temperature=temperature,
        sharpness=fit_sharpness(confidences, agrees),
        ridge=ridge,
        agreement=float(agrees.float().mean()),
    )


def _folds(labels: torch.Tensor) -> torch.Tensor:
    """[texts]: the fold of each, drawn so that every fold has its share of every label."""
    drawn = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED)).to(labels.device)
    by_label = drawn[labels[drawn].argsort(stable=True)]
    folds = torch.empty_like(labels)
    folds[by_label] = torch.arange(len(labels), device=labels.device) % FOLDS
    return folds


def _cross_validated(
    features: torch.Tensor, targets: torch.Tensor, fold: torch.Tensor, epochs: int
) -> tuple[float, torch.Tensor]:
    """The ridge with the least loss on texts that heads didn't see, and their logits with it, [texts, labels]."""
    logits = torch.zeros(len(RIDGES), *targets.shape, device=features.device)
    for number in range(FOLDS):
        seen, unseen = fold != number, fold == number
        heads = _Fit(features[seen], targets[seen]).to(RIDGES, epochs)
        for index, (weight, bias) in enumerate(heads):
            logits[index, unseen] = torch.addmm(bias, features[unseen], weight.T)
    losses = [float(functional.cross_entropy(candidate, targets)) for candidate in logits]
    best = losses.index(min(losses))
    return RIDGES[best], logits[best]


class _Fit:
    """L-BFGS on the features and targets of some texts."""

    def __init__(self, features: torch.Tensor, targets: torch.Tensor) -> None:
        self._features, self._targets = features, targets
        width, labels = features.shape[1], targets.shape[1]
        self._weight = torch.zeros(labels, width, device=features.device, requires_grad=True)
        self._bias = torch.zeros(labels, device=features.device, requires_grad=True)

    def to(self, ridges: Sequence[float], epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Weight and bias at each ridge, with at most so many passes over the texts for each."""
        heads = []
        for ridge in ridges:
            self._minimise(ridge, epochs)
            heads.append((self._weight.detach().clone(), self._bias.detach().clone()))
        return heads

    def _minimise(self, ridge: float, epochs: int) -> None:
        optimiser = torch.optim.LBFGS(
            [self._weight, self._bias],
            max_iter=epochs,
            max_eval=epochs,
            history_size=_HISTORY,
            tolerance_grad=_GRADIENT,
            tolerance_change=_CHANGE,
            line_search_fn="strong_wolfe",
        )

        def loss() -> torch.Tensor:
            optimiser.zero_grad()
            logits = torch.addmm(self._bias, self._features, self._weight.T)
            value = functional.cross_entropy(logits, self._targets) + ridge * self._weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimiser.step(loss)  # type: ignore[no-untyped-call]
        if not bool(torch.isfinite(self._weight).all()):
            raise PreparationError(
                Reason.UNUSABLE_TRAINING,
                "an exit head's weights became NaN or infinite: are the model's weights damaged?",
            )


def recalibrated(head: TrainedHead, features: torch.Tensor, labels: torch.Tensor) -> TrainedHead:
    """The head with the temperature that fits other text best: float32 [texts, features], int64 [texts].

    Sharpness changes with it: that keeps probabilities of agreement as they were (with two labels; nearly with more).
    """
    logits = torch.addmm(head.bias, features.cpu(), head.weight.T)
    temperature = fit_temperature(logits, labels.cpu())
    return replace(head, temperature=temperature, sharpness=head.sharpness * temperature / head.temperature)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Of softmax(logits [texts, labels] / temperature), the one with the least loss."""
    return _least(lambda value: float(functional.cross_entropy(logits / value, labels)), *_TEMPERATURES)


def fit_sharpness(confidences: torch.Tensor, agrees: torch.Tensor) -> float:
    """The slope a with which sigmoid(a * logit(confidence)) says best how likely `agrees` is; both are [texts]."""
    logits = confidences.double().clamp(1e-6, 1 - 1e-6).logit()
    wanted = agrees.double()
    return _least(lambda slope: float(functional.binary_cross_entropy_with_logits(slope * logits, wanted)), *_SHARPNESS)


def _least(loss: Callable[[float], float], lowest: float, highest: float) -> float:
    """Where a loss with a single valley is least: golden-section search over the logarithm."""
    low, high = math.log(lowest), math.log(highest)
    for _ in range(_SEARCH_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if loss(math.exp(left)) <= loss(math.exp(right)):
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)
