"""Retrain a LoRA adapter (Hu et al., arXiv 2106.09685) for quantised weights.

An adapter that was trained on full precision corrects weights that quantising has moved. It is trained on for a few
hundred steps on the quantised base, which is frozen: gradients reach the adapter alone. The loss is the text's own
(next token) plus the KL divergence from the teacher, the quantised base without the adapter, which keeps what the text
doesn't speak of as it is; the learning rate is a fifth of the original training's, as little has to change.

The quantised base computes here with full-precision weights of equal value, so that it can be differentiated.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sixfold_api.precision import Scheme
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.lora import RETRAINED_FILE, base_digest
from sixfold_runtime.engine.quantized_module import plain_state
from sixfold_runtime.prepare.adapter import import_peft, require_adapter
from sixfold_runtime.prepare.evaluate import device
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import read_config
from sixfold_runtime.prepare.quantised import scheme_of
from sixfold_runtime.prepare.saturation import dequantised
from sixfold_runtime.prepare.texts import MIN_TOKENS, Sample, TextReader, windows

ORIGINAL_LEARNING_RATE = 2e-4
"""PEFT's usual one; an adapter doesn't record its own."""
LEARNING_RATE_DIVISOR = 5
TEACHER_WEIGHT = 0.1
"""Of the divergence beside the text's loss: enough to hold, too little to pull the adapter's own effect back."""
WINDOW_TOKENS = 512
_BATCH = 4
_HELD_OUT_SHARE = 0.1
_MIN_SAMPLES = 20


@dataclass(frozen=True)
class Retrained:
    """Loss on held-out samples (next token, nats) with the adapter as it was, and as it is."""

    before: float
    after: float


def retrain(
    base: Path,
    adapter: Path,
    text: Path,
    target: Path,
    learning_rate: float,
    steps: int,
    log: Callable[[str], None],
    seed: int = 0,
) -> Retrained:
    """Train `adapter` on the quantised model in `base`, and write it to `target` if it got better.

    Args:
        text: JSON lines as for calibration; a tenth of them is held out.
        learning_rate: of the original training.

    Raises PreparationError: UnsupportedPrecision for a base that isn't quantised, UnusableCalibration for
    too little text, NonFiniteWeights, UnusableAdapter also if the adapter didn't get better.
    """
    scheme = scheme_of(read_config(base))
    if scheme is Scheme.NONE:
        raise PreparationError(
            Reason.UNSUPPORTED_PRECISION, f"{base.name} is in full precision: its adapter needs no other training"
        )
    require_adapter(adapter)
    training, held_out = _split(_read(base, text), seed)
    torch.manual_seed(seed)
    model = _adapted(base, adapter)
    before = _loss(model, held_out)
    log(f"held-out loss {before:.4f} with the adapter as it is ({len(training)} windows to train on, {steps} steps)")
    _train(model, training, learning_rate / LEARNING_RATE_DIVISOR, steps, random.Random(seed), log)
    after = _loss(model, held_out)
    log(f"held-out loss {before:.4f} -> {after:.4f}")
    if not after < before:
        raise PreparationError(
            Reason.UNUSABLE_ADAPTER,
            f"the adapter got no better (held-out loss {before:.4f} -> {after:.4f}) and was not written: use more "
            "text, or another --learning-rate",
        )
    _write(model, base, scheme, target)
    return Retrained(before, after)


def _read(base: Path, text: Path) -> list[Sample]:
    reader = TextReader(base)
    samples = []
    for number, line in enumerate(text.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                samples.append(reader.sample(number, json.loads(line)))
            except ValueError as error:
                raise PreparationError(Reason.UNUSABLE_CALIBRATION, f"{text.name}: line {number}: {error}") from error
    samples = [sample for sample in samples if len(sample.ids) >= MIN_TOKENS]
    if len(samples) < _MIN_SAMPLES:
        raise PreparationError(
            Reason.UNUSABLE_CALIBRATION,
            f"{text.name} holds {len(samples)} samples of at least {MIN_TOKENS} tokens, {_MIN_SAMPLES} are needed",
        )
    return samples


def _split(samples: Sequence[Sample], seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Windows to train on and held-out ones, of different samples."""
    shuffled = list(samples)
    random.Random(seed).shuffle(shuffled)
    count = max(2, int(len(shuffled) * _HELD_OUT_SHARE))
    return windows(shuffled[count:], WINDOW_TOKENS), windows(shuffled[:count], WINDOW_TOKENS)


def _adapted(base: Path, adapter: Path) -> Any:
    """PEFT's model: the quantised base, frozen and float32, and the adapter to be trained."""
    peft = import_peft()
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    del config.quantization_config
    state = plain_state(TensorStore(base), torch.float32)
    state |= {f"{name}.weight": weight for name, weight in dequantised(base)}
    model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32).to(device())
    try:
        return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    except Exception as error:  # foreign code on foreign input: it raises anything
        raise PreparationError(Reason.UNUSABLE_ADAPTER, f"{adapter.name} does not fit {base.name}: {error}") from error


def _train(
    model: Any,
    text: Sequence[Sequence[int]],
    learning_rate: float,
    steps: int,
    order: random.Random,
    log: Callable[[str], None],
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    model.train()
    for step in range(1, steps + 1):
        total = 0.0
        for ids in order.choices(text, k=_BATCH):
            loss = _step_loss(model, ids) / _BATCH
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        if step % max(1, steps // 10) == 0:
            log(f"step {step} of {steps}: loss {total:.4f}")
    model.eval()


def _step_loss(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Next-token loss plus the weighted KL(teacher || student), means over tokens."""
    row = torch.tensor([list(ids)], device=model.device)
    with torch.no_grad(), model.disable_adapter():
        teacher = model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
    student = model(input_ids=row).logits[0, :-1].float().log_softmax(-1)
    task = torch.nn.functional.nll_loss(student, row[0, 1:])
    divergence = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="batchmean")
    return task + TEACHER_WEIGHT * divergence


@torch.inference_mode()
def _loss(model: Any, text: Sequence[Sequence[int]]) -> float:
    """Mean next-token loss over all tokens. Raises PreparationError(NonFiniteWeights)."""
    model.eval()
    total, tokens = 0.0, 0
    for ids in text:
        row = torch.tensor([list(ids)], device=model.device)
        logits = model(input_ids=row).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum"))
        tokens += len(ids) - 1
    if total != total or total == float("inf"):
        raise PreparationError(Reason.NON_FINITE_WEIGHTS, "the adapter on these weights answers NaN or infinite logits")
    return total / tokens


def _write(model: Any, base: Path, scheme: Scheme, target: Path) -> None:
    """The adapter in PEFT's format with the mark of its base; the folder appears when it is whole."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    mark = {"base_digest": base_digest(TensorStore(base)), "scheme": str(scheme)}
    (partial / RETRAINED_FILE).write_text(json.dumps(mark, indent=1))
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
