"""The draft model of a served one: loaded once, on the device where it is faster, if it has the same tokenizer."""

from __future__ import annotations

import logging
import threading
import time
from statistics import median

import torch

from sixfold_api.generation import DraftDevice
from sixfold_api.runtime_config import Draft, ServedModel, WeightSet
from sixfold_api.scalars import Task
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.tokenizer import LoadedTokenizer

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_TIMED_STEPS, _UNTIMED_STEPS = 15, 3
_loading = threading.Lock()


def load_alone(served: ServedModel, device: torch.device) -> LoadedModel:
    """`load`, from any thread: transformers can't build two models at once. Raises ModelLoadError."""
    with _loading:
        return load(served, device)


def as_served(weights: WeightSet) -> ServedModel:
    """What the loader takes."""
    return ServedModel(name=weights.name, task=Task.GENERATION, path=weights.path, digest=weights.digest)


def tokenizer_difference(target: LoadedTokenizer, other: LoadedTokenizer) -> str:
    """What keeps ids of one tokenizer from meaning the same in the other; "" if nothing does.

    Embedding rows beyond the tokenizer's ids, as padded checkpoints of one family have them, make no difference.
    """
    ours = target.tokenizer.get_vocab(with_added_tokens=True)
    theirs = other.tokenizer.get_vocab(with_added_tokens=True)
    if ours == theirs:
        return ""
    different = [token for token, token_id in ours.items() if theirs.get(token) != token_id]
    if not different:
        return f"it has {len(theirs) - len(ours)} tokens more"
    example = min(different, key=lambda token: ours[token])
    return f"{len(different)} of {len(ours)} tokens have another id or none, such as {example!r}"


def draft_devices(wanted: DraftDevice, target: torch.device) -> tuple[torch.device, ...]:
    """Devices on which a draft may compute: one, or those to choose from by measuring."""
    if wanted is DraftDevice.CPU or target.type == "cpu":
        return (_CPU,)
    return (target,) if wanted is DraftDevice.TARGET else (target, _CPU)


def load_draft(draft: Draft, target: LoadedModel) -> LoadedModel:
    """Load the draft of `target`.

    Raises:
        ModelLoadError: it can't be loaded, or has another tokenizer.
    """
    loaded = [load_alone(as_served(draft), device) for device in draft_devices(draft.device, target.device)]
    if difference := tokenizer_difference(target.tokenizer, loaded[0].tokenizer):
        raise ModelLoadError(
            f"the draft {draft.name} has another tokenizer than {target.served.name}: {difference}; "
            "a draft has to be trained with the target's tokenizer"
        )
    if len(loaded) == 1:
        log.info("draft %s of %s computes on %s", draft.name, target.served.name, loaded[0].device)
        return loaded[0]
    seconds = [step_seconds(model) for model in loaded]
    times = ", ".join(f"{1e3 * s:.2f} ms on {model.device}" for s, model in zip(seconds, loaded, strict=True))
    faster = loaded[seconds.index(min(seconds))]
    log.info("draft %s of %s computes on %s: a step takes %s", draft.name, target.served.name, faster.device, times)
    return faster


def step_seconds(model: LoadedModel) -> float:
    """Median time of decoding one token with a short context, the logits on the host included."""
    forward = make_forward(model)
    cache = forward.new_cache(1)
    forward([[0] * 16], cache)
    times = []
    for _ in range(_UNTIMED_STEPS + _TIMED_STEPS):
        started = time.perf_counter()
        forward([[0]], cache).cpu()
        times.append(time.perf_counter() - started)
    return median(times[_UNTIMED_STEPS:])
