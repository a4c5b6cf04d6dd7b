"""Train a classifier's layers together with exit heads (`exitHeads.train: Trunk`), and rewrite its weights.

Every head has the loss that exit_training.py gives it; their mean stands beside the loss of the model's own head (deep
supervision: Lee et al., arXiv 1409.5185). AdamW with warm-up and linear decay over batches of texts of like length,
dropout as the model's configuration has it. The heads of this training are scaffolding: those that are served are
fitted anew over the final layers.
"""

from __future__ import annotations

import importlib
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from sixfold_api.exit_heads import ExitHeads
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.prepare.artifact import write_weights
from sixfold_runtime.prepare.exit_texts import ExitTexts
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import EXITS, SLICES, WEIGHTS_INDEX, files_in, read_config, weight_files
from sixfold_runtime.prepare.slice_trunk import label_logits
from sixfold_runtime.prepare.texts import Sample

DEFAULT_EPOCHS = 1
LEARNING_RATE = 2e-5
_HEAD_LEARNING_RATE = 1e-3
_BATCH = 16
_WARM_UP_SHARE = 0.1
_WEIGHT_DECAY = 0.01
_CLIP = 1.0
_SEED = 0
_LINES = 10
"""Lines of progress in a log."""


def train(
    folder: Path,
    model: LoadedModel,
    depths: Sequence[int],
    texts: ExitTexts,
    spec: ExitHeads,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train on the training text and put the new weights in place of the old; what was made for those is removed.

    Returns: what was done, and the accuracy of the source's weights on the evaluation text.

    Raises PreparationError: UnsupportedPrecision for quantised weights, UnusableTraining for a loss that isn't finite.
    """
    if read_config(folder).get("quantization_config"):
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION,
            "train: Trunk needs full-precision weights, and these are quantised: use train: Heads, or quantise after",
        )
    before = _accuracy(model, texts.evaluation)
    epochs = spec.epochs or DEFAULT_EPOCHS
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        joint = _Joint(folder, depths, float(spec.distillation), model.device)
        _fit(joint, texts.training, epochs, log)
    _rewrite(folder, joint.module)
    return {"epochs": epochs, "learningRate": LEARNING_RATE, "sourceAccuracy": round(before, 6)}


class _Joint:
    """transformers' module with a head behind each depth."""

    def __init__(self, folder: Path, depths: Sequence[int], distillation: float, device: torch.device) -> None:
        transformers: Any = importlib.import_module("transformers")
        self.module: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
        )
        self.module.to(device).train()
        config = self.module.config.get_text_config()
        self._depths, self._distillation, self._device = depths, distillation, device
        self._is_decoder = hasattr(self.module, "score")
        self._pad_id: int = config.pad_token_id or 0
        heads = [torch.nn.Linear(2 * config.hidden_size, self.module.config.num_labels) for _ in depths]
        self.heads = torch.nn.ModuleList(heads).to(device)

    def loss(self, batch: Sequence[Sample]) -> torch.Tensor:
        """Of the own head plus the mean of the exit heads, over the texts."""
        lengths = torch.tensor([len(sample.ids) for sample in batch], device=self._device)
        longest = int(lengths.max())
        ids = [[*sample.ids, *[self._pad_id] * (longest - len(sample.ids))] for sample in batch]
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        anchors = lengths - 1 if self._is_decoder else torch.zeros_like(lengths)
        labels = torch.tensor([sample.label for sample in batch], device=self._device)
        logits, hidden = self._forward(torch.tensor(ids, device=self._device), mask, anchors)
        own = functional.one_hot(labels, logits.shape[1]).float()
        targets = (1 - self._distillation) * own + self._distillation * logits.detach().softmax(dim=1)
        losses = [
            functional.cross_entropy(head(_features(hidden[depth], mask, anchors)), targets)
            for head, depth in zip(self.heads, self._depths, strict=True)
        ]
        return functional.cross_entropy(logits, labels) + torch.stack(losses).mean()

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Logits, and hidden states after 0, 1, ... layers [texts, tokens, width]."""
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long(), "output_hidden_states": True}
        if not self._is_decoder:
            output = self.module(**inputs)
            return output.logits, output.hidden_states
        # transformers looks for the last token by the padding's id, which a text may hold.
        output = self.module.base_model(**inputs, use_cache=False)
        return self.module.score(_picked(output.last_hidden_state, anchors)), output.hidden_states


def _features(hidden: torch.Tensor, mask: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """As Trunk.features: [texts, 2 * width]"""
    mean = (hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    return torch.cat([_picked(hidden, anchors), mean], dim=1)


def _picked(hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    return hidden[torch.arange(len(hidden), device=hidden.device), anchors]


def _fit(joint: _Joint, samples: Sequence[Sample], epochs: int, log: Callable[[str], None]) -> None:
    batches = [batch for epoch in range(epochs) for batch in _batches(samples, random.Random(_SEED + epoch))]
    trunk, heads = list(joint.module.parameters()), list(joint.heads.parameters())
    optimiser = torch.optim.AdamW(
        [{"params": trunk, "lr": LEARNING_RATE}, {"params": heads, "lr": _HEAD_LEARNING_RATE}],
        weight_decay=_WEIGHT_DECAY,
    )
    warm_up = max(1.0, _WARM_UP_SHARE * len(batches))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm_up, (len(batches) - step) / max(1.0, len(batches) - warm_up))
    )
    for step, batch in enumerate(batches, start=1):
        loss = joint.loss(batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise PreparationError(
                Reason.UNUSABLE_TRAINING,
                f"the loss became {value} in step {step} of {len(batches)}, near line {batch[0].line} of the "
                "training text: are the model's weights damaged?",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([*trunk, *heads], _CLIP)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % max(1, len(batches) // _LINES) == 0:
            log(f"step {step} of {len(batches)}: loss {value:.4f}")


def _batches(samples: Sequence[Sample], order: random.Random) -> list[list[Sample]]:
    """In a random order, each of neighbours by length out of a shuffled set, so that little is padding."""
    shuffled = sorted(order.sample(samples, len(samples)), key=lambda sample: len(sample.ids) // 4)
    batches = [shuffled[start : start + _BATCH] for start in range(0, len(shuffled), _BATCH)]
    order.shuffle(batches)
    return batches


def _accuracy(model: LoadedModel, samples: Sequence[Sample]) -> float:
    logits = label_logits(model, [sample.ids for sample in samples], None)
    right = sum(int(row.argmax()) == sample.label for row, sample in zip(logits, samples, strict=True))
    return right / len(samples)


def _rewrite(folder: Path, module: Any) -> None:
    """New weights in the types of the old; the old files may be links to the source's and are replaced, not written."""
    store = TensorStore(folder)
    types = {name: store.get(name).dtype for name in store.names}
    del store
    for name in [*weight_files(folder, files_in(folder, folder)), WEIGHTS_INDEX, EXITS]:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / SLICES, ignore_errors=True)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in module.state_dict().items():
            yield name, tensor.detach().to("cpu", types.get(name, torch.float32)).clone()

    write_weights(folder, tensors())
