"""Two sets of weights on the same held-out text, computed by the engine's own forward: what is measured is served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold_api.precision import QualityReport
from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification_run import first_forward
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import Forward, make_forward
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.texts import Sample

WINDOW_TOKENS = 512
"""Held-out text is cut into windows of this many tokens, or of the context where that is shorter."""
DEFAULT_PERPLEXITY_PERCENT = 1.0
DEFAULT_ACCURACY_POINTS = 0.5


@dataclass(frozen=True)
class Quality:
    """The prepared weights against the source's.

    Attributes:
        metric: perplexity or accuracy.
        source, prepared: its value for each.
        loss: percent of perplexity, or points of accuracy.
        kl: mean KL(source || prepared) in nats a token; None for a classifier.
    """

    metric: str
    source: float
    prepared: float
    loss: float
    kl: float | None = None

    def report(self, budget: float, samples: int, tries: int) -> QualityReport:
        return QualityReport(
            metric=self.metric,
            source=decimal(self.source),
            prepared=decimal(self.prepared),
            loss=decimal(self.loss),
            budget=decimal(budget),
            samples=samples,
            tries=tries,
            kl=None if self.kl is None else decimal(self.kl),
        )


def decimal(value: float) -> str:
    """A quoted decimal of at most six digits behind the point."""
    return f"{min(max(value, -999_999_999.0), 999_999_999.0):.6f}".rstrip("0").rstrip(".")


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_weights(folder: Path, task: Task) -> LoadedModel:
    """A folder's model as the engine loads it. Raises PreparationError(UnsupportedPrecision)."""
    try:
        return load(ServedModel(name=folder.name, task=task, path=str(folder)), device())
    except ModelLoadError as error:
        raise PreparationError(Reason.UNSUPPORTED_PRECISION, f"the engine can't load the weights: {error}") from error


class CausalScorer:
    """Next-token logits of whole windows."""

    def __init__(self, model: LoadedModel) -> None:
        self.forward: Forward = make_forward(model)
        self._name = Path(model.served.path).name

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary]. Raises PreparationError(NonFiniteWeights)."""
        logits = self.forward([list(ids)], self.forward.new_cache(1), every_position=True)[0]
        return require_finite(logits, self._name)

    def loss(self, ids: Sequence[int]) -> float:
        """Mean negative log-likelihood of all tokens but the first, nats."""
        return float(-_picked(self.logits(ids).log_softmax(-1), ids).mean())


def require_finite(logits: torch.Tensor, name: str) -> torch.Tensor:
    if not bool(torch.isfinite(logits).all()):
        raise PreparationError(
            Reason.NON_FINITE_WEIGHTS, f"{name.strip('.')}: the model answers NaN or infinite logits on held-out text"
        )
    return logits


def _picked(log_probabilities: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    """Log-probability of each token after the first, [tokens - 1]."""
    following = torch.tensor(ids[1:], device=log_probabilities.device)
    return log_probabilities[:-1].gather(1, following[:, None])[:, 0]


def divergence_sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Sum over positions of KL(first || second) in nats; both are log-probabilities [positions, vocabulary]."""
    return (first.exp() * (first - second)).sum(dtype=torch.float64)


def compare_generation(source: CausalScorer, prepared: CausalScorer, windows: Sequence[Sequence[int]]) -> Quality:
    """Perplexity of both on the same tokens, and the divergence. Raises PreparationError(NonFiniteWeights)."""
    source_loss = prepared_loss = divergence = 0.0
    tokens = 0
    for ids in windows:
        before, after = source.logits(ids).log_softmax(-1), prepared.logits(ids).log_softmax(-1)
        source_loss -= float(_picked(before, ids).sum(dtype=torch.float64))
        prepared_loss -= float(_picked(after, ids).sum(dtype=torch.float64))
        divergence += float(divergence_sum(before[:-1], after[:-1]))
        tokens += len(ids) - 1
    before_ppl, after_ppl = math.exp(source_loss / tokens), math.exp(prepared_loss / tokens)
    return Quality("perplexity", before_ppl, after_ppl, 100 * (after_ppl / before_ppl - 1), divergence / tokens)


def compare_classification(source: LoadedModel, prepared: LoadedModel, samples: Sequence[Sample]) -> Quality:
    """Accuracy of both on the same labelled texts, in percent. Raises PreparationError(NonFiniteWeights)."""
    before, after = _accuracy(source, samples), _accuracy(prepared, samples)
    return Quality("accuracy", before, after, before - after)


@torch.inference_mode()
def _accuracy(model: LoadedModel, samples: Sequence[Sample]) -> float:
    """Percent of the samples whose label is the likeliest; a text longer than the context is cut."""
    right = 0
    for sample in samples:
        logits = first_forward(model, list(sample.ids[: model.context_tokens]))[0]
        require_finite(logits, Path(model.served.path).name)
        right += int(logits.argmax()) == sample.label
    return 100 * right / len(samples)
