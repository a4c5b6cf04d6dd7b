"""What the texts of a classifier cost: each step's operations and seconds, divided among the texts in it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sixfold_api.scalars import Task
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.model_flops import model_flops
from sixfold_runtime.engine.waste_metrics import FlopsMetrics
from sixfold_runtime.waste import Cause, ModelFlops

if TYPE_CHECKING:
    from sixfold_runtime.engine.classification_queue import Text
    from sixfold_runtime.engine.exit_estimate import ExitEstimate

log = logging.getLogger(__name__)


@dataclass
class TextAccount:
    """One text's, so far."""

    useful: int = 0
    """Floating-point operations."""
    padding: int = 0
    """Those of positions that belong to no text, for its sake or its batch-mates'."""
    engine_seconds: float = 0.0
    needed_layers: int | None = None
    """After how many it would have left, were early exit on; None where nobody looked."""


class ClassificationAccounting:
    """Of one model. Used from one thread.

    Exit heads, embeddings and what only a task slice has are left out: they are far below 1 % of the layers.
    """

    def __init__(self, model: LoadedModel, metrics: FlopsMetrics, estimate: ExitEstimate) -> None:
        self._flops = _flops_of(model)
        self._metrics = metrics
        self._estimate = estimate
        self._stepped: Sequence[Text] = ()

    def computed(self, texts: Sequence[Text], layers: int | None = None, *, pad_linears: bool, pad_pairs: bool) -> None:
        """So many layers were computed for these; None: all.

        Args:
            pad_linears: every text took as many positions as the longest.
            pad_pairs: so it did in attention.
        """
        self._stepped = texts
        longest = max(text.tokens for text in texts)
        for text in texts:
            own = self._flops.text(text.tokens, layers)
            columns = longest if pad_pairs else text.tokens
            spent = self._flops.forward(longest if pad_linears else text.tokens, columns * columns, layers=layers)
            text.account.useful += own
            text.account.padding += spent - own

    def headed(self, texts: Sequence[Text], task: Task) -> None:
        """Their labels were computed behind the last layer."""
        for text in texts:
            outputs = text.tokens if task is Task.TOKEN_CLASSIFICATION else 1
            text.account.useful += self._flops.forward(0, 0, outputs)

    def took(self, seconds: float) -> None:
        """The step's seconds, by tokens, since all texts of a step go through the same layers."""
        texts, self._stepped = self._stepped, ()
        if texts:
            self._estimate.computed(seconds)
            a_token = seconds / sum(text.tokens for text in texts)
            for text in texts:
                text.account.engine_seconds += a_token * text.tokens

    def ended(self, text: Text, is_answered: bool = False) -> None:
        """Count what a text cost: nobody computes it any further."""
        account, add = text.account, self._metrics.add
        if text.cancelled:
            add(text.level, text.arm, account.useful + account.padding, Cause.CANCELLED)
            return
        unneeded = self._unneeded(text) if is_answered else 0
        add(text.level, text.arm, account.useful - unneeded)
        add(text.level, text.arm, account.padding, Cause.PADDING)
        add(text.level, text.arm, unneeded, Cause.UNNEEDED_LAYERS, estimated=True)

    def _unneeded(self, text: Text) -> int:
        """Of its operations, those that early exit would have saved if it were on."""
        if not text.could_exit:
            return 0
        if text.account.needed_layers is not None:
            return self._flops.text(text.tokens, self._flops.layers - text.account.needed_layers)
        return round(self._estimate.unneeded_share * self._flops.text(text.tokens))


def _flops_of(model: LoadedModel) -> ModelFlops:
    try:
        return model_flops(model)
    except AttributeError as error:  # of transformers' many architectures, some name their parts in other ways
        log.warning("model %s: its floating-point operations aren't counted: %s", model.served.name, error)
        return ModelFlops(layers=1, layer_weights=0, attention_width=0)
