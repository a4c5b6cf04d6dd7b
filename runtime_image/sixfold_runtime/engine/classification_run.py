"""One batch of texts on its way through a classifier.

With a trunk of the engine's own, a batch goes on from one exit to the next: those that are sure enough leave, the
others are packed again and go on from their hidden states. Nothing is computed twice, and exit heads compute only
where a text may leave (DeeBERT, arXiv 2004.12993, with the survivors of a batch regrouped). Other models compute a
batch in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.classification_accounting import ClassificationAccounting
from sixfold_runtime.engine.classification_labels import ranked, token_labels
from sixfold_runtime.engine.classification_metrics import ExitMetrics
from sixfold_runtime.engine.classification_queue import Text
from sixfold_runtime.engine.exit_estimate import Glance
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.protocol import LabelScore
from sixfold_runtime.engine.trunk import Head, Rows, Trunk


@dataclass(frozen=True)
class Answer:
    """What came of a text."""

    text: Text
    is_finite: bool
    """False: NaN or infinite logits, and there are no labels."""
    scores: list[LabelScore] = field(default_factory=list)
    token_labels: list[LabelScore] = field(default_factory=list)
    layers: int | None = None
    exited: bool = False


class Run(Protocol):
    """A batch that is being computed.

    Attributes:
        texts: those without an answer so far. Where `advance` raises, these have none.
    """

    texts: list[Text]

    def advance(self) -> list[Answer]:
        """Compute a step, at most until texts may leave, and answer those that do. Drops cancelled ones first."""


class LayeredRun:
    """Through a trunk."""

    def __init__(
        self,
        trunk: Trunk,
        texts: Sequence[Text],
        metrics: ExitMetrics,
        accounting: ClassificationAccounting,
        step_tokens: int,
        glance: Glance | None = None,
    ) -> None:
        """
        Args:
            step_tokens: `advance` computes no more than so many tokens through all layers, or one layer.
            glance: looks where texts would leave.
        """
        self.texts = list(texts)
        self._trunk = trunk
        self._metrics = metrics
        self._accounting = accounting
        self._glance = glance
        self._step_token_layers = step_tokens * trunk.layers
        self._depth = 0
        self._rows: Rows | None = None

    @torch.inference_mode()
    def advance(self) -> list[Answer]:
        rows = self._wanted_rows()
        if rows is None:
            return []
        slices = [text.task_slice for text in self.texts]
        exit_depth = self._exit_depth()
        step_layers = max(1, self._step_token_layers // sum(rows.lengths))
        depth = min(exit_depth, self._depth + step_layers)
        for index in range(self._depth, depth):
            rows = self._trunk.layer(index, rows, slices if any(slices) else None)
            if self._glance is not None:
                self._glance.look(index + 1, rows, self.texts)
        # Attention on CUDA pads.
        pads = self._trunk.device.type == "cuda"
        self._accounting.computed(self.texts, depth - self._depth, pad_linears=False, pad_pairs=pads)
        self._depth = depth
        answers: list[Answer] = []
        if depth == self._trunk.layers:
            answers = self._all_labelled(rows)
            if self._glance is not None:
                self._glance.end()
        elif depth == exit_depth:
            answers = self._sure_ones(rows)
        gone = {answer.text for answer in answers}
        kept = [index for index, text in enumerate(self.texts) if text not in gone]
        self._rows = _select(self._trunk, rows, kept) if kept else None
        self.texts = [self.texts[index] for index in kept]
        return answers

    def _wanted_rows(self) -> Rows | None:
        """Of the texts that nobody cancelled; None if there are none."""
        kept = [index for index, text in enumerate(self.texts) if not text.cancelled]
        rows, texts = self._rows, [self.texts[index] for index in kept]
        if not texts:
            rows = None
        elif rows is None:
            rows = self._trunk.embed([text.request.token_ids for text in texts])
        else:
            rows = _select(self._trunk, rows, kept)
        self.texts = texts
        return rows

    def _exit_depth(self) -> int:
        """Where texts may leave next; the last layer at last."""
        plans = {text.plan for text in self.texts if text.plan is not None}
        depths = (plan.next_depth(self._depth) for plan in plans)
        return min((depth for depth in depths if depth is not None), default=self._trunk.layers)

    def _sure_ones(self, rows: Rows) -> list[Answer]:
        """Those that leave at an exit, with its labels. NaN is never sure enough."""
        head, depth = self._trunk.own_head, self._depth
        plans = {index: text.plan for index, text in enumerate(self.texts) if text.plan is not None}
        asked = [index for index, plan in plans.items() if depth in plan.exits.thresholds]
        assert asked and head is not None
        heads = plans[asked[0]].heads  # they are the model's, whatever the thresholds
        scores = heads.scores(depth, self._trunk.features(_select(self._trunk, rows, asked)))
        confidences: list[float] = scores.amax(dim=-1).tolist()
        self._metrics.asked(depth, confidences)
        sure = [
            place
            for place, (index, confidence) in enumerate(zip(asked, confidences, strict=True))
            if confidence >= plans[index].exits.least_confidence(depth, self.texts[index].tokens)
        ]
        if not sure:
            return []
        texts = [self.texts[asked[place]] for place in sure]
        best = ranked(scores[sure], head.labels, _counts(texts, head.labels))
        return [
            Answer(text, is_finite=True, scores=found, layers=depth, exited=True)
            for text, found in zip(texts, best, strict=True)
        ]

    def _all_labelled(self, rows: Rows) -> list[Answer]:
        """After the last layer: each text by its own head."""
        by_head: dict[int, tuple[Head, list[int]]] = {}
        for index, text in enumerate(self.texts):
            head = self._trunk.own_head if text.task_slice is None else text.task_slice.head
            assert head is not None, "checked before a text is queued"
            by_head.setdefault(id(head), (head, []))[1].append(index)
        answers: list[Answer] = []
        for head, indexes in by_head.values():
            chosen = _select(self._trunk, rows, indexes)
            logits = head(chosen)
            texts = [self.texts[index] for index in indexes]
            self._accounting.headed(texts, head.task)
            if head.task == Task.TOKEN_CLASSIFICATION:
                answers += _token_answers(logits, head.labels, texts, chosen.lengths, self._depth)
            else:
                found = _answers(logits, head.labels, texts, self._depth)
                if head is self._trunk.own_head:
                    self._metrics.asked(self._depth, [answer.scores[0].score for answer in found if answer.is_finite])
                answers += found
        return answers


class ModuleRun:
    """Through a transformers module, in one forward, padded on the right and masked."""

    def __init__(
        self, model: LoadedModel, texts: Sequence[Text], pad_id: int, accounting: ClassificationAccounting
    ) -> None:
        self.texts = list(texts)
        self._model = model
        self._pad_id = pad_id
        self._accounting = accounting

    @torch.inference_mode()
    def advance(self) -> list[Answer]:
        texts = [text for text in self.texts if not text.cancelled]
        answers: list[Answer] = []
        if texts:
            logits = _module_logits(self._model, [text.request.token_ids for text in texts], self._pad_id)
            self._accounting.computed(texts, pad_linears=True, pad_pairs=True)
            self._accounting.headed(texts, Task.CLASSIFICATION)
            answers = _answers(logits, self._model.labels, texts, None)
        self.texts = []
        return answers


@torch.inference_mode()
def first_forward(model: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 logits of a text; of a bare trunk, its hidden states."""
    trunk = model.trunk
    if trunk is None:
        return _module_logits(model, [token_ids], 0)
    rows = trunk.embed([token_ids])
    for index in range(trunk.layers):
        rows = trunk.layer(index, rows)
    return rows.hidden.float() if trunk.own_head is None else trunk.own_head(rows)


def _module_logits(model: LoadedModel, token_ids: Sequence[list[int]], pad_id: int) -> torch.Tensor:
    """float32 [texts, labels]."""
    longest = max(len(ids) for ids in token_ids)
    output = model.module(
        input_ids=torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids in token_ids], device=model.device),
        attention_mask=torch.tensor(
            [[1] * len(ids) + [0] * (longest - len(ids)) for ids in token_ids], device=model.device
        ),
    )
    logits: torch.Tensor = output.logits
    return logits.float()


def _select(trunk: Trunk, rows: Rows, keep: Sequence[int]) -> Rows:
    """The texts at these indices; nothing is copied where they are all."""
    return rows if len(keep) == len(rows.lengths) else trunk.select(rows, keep)


def _counts(texts: Sequence[Text], labels: Sequence[str]) -> list[int]:
    """How many labels each text's answer holds."""
    return [min(text.request.top_k or len(labels), len(labels)) for text in texts]


def _answers(logits: torch.Tensor, labels: Sequence[str], texts: Sequence[Text], layers: int | None) -> list[Answer]:
    """`logits`: [texts, labels]."""
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    best = ranked(torch.softmax(logits, dim=-1), labels, _counts(texts, labels))
    return [
        Answer(text, is_finite, found if is_finite else [], layers=layers)
        for text, is_finite, found in zip(texts, finite, best, strict=True)
    ]


def _token_answers(
    logits: torch.Tensor, labels: Sequence[str], texts: Sequence[Text], lengths: Sequence[int], layers: int
) -> list[Answer]:
    """`logits`: [tokens, labels], text after text."""
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    best = token_labels(torch.softmax(logits, dim=-1), labels, lengths)
    answers, start = [], 0
    for text, found in zip(texts, best, strict=True):
        is_finite = all(finite[start : start + len(found)])
        answers.append(Answer(text, is_finite, token_labels=found if is_finite else [], layers=layers))
        start += len(found)
    return answers
