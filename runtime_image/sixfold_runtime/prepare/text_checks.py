"""Is calibration text fit for its purpose, and is held-out text really held out? Pure, given what the model measured.

GPTQ fits the weights to the activations that calibration text causes. Random or constant text causes activations that
no user's request does: the weights come out worse than plain rounding, or as NaN.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.texts import Sample

MAX_ODD_SHARE = 0.1
"""Most samples that may repeat others, or tell nothing."""
MIN_ORDER_NATS = 1.0
"""What the order of a text's tokens must be worth to the model, in nats a token. Measured with the example models: 5.4
(at least 4.5) on plays, 0.2 (at most 0.7) on random characters, random tokens, base64 and repetition."""
_CHECKED_SAMPLES = 32
_CHECKED_TOKENS = 256
_SHINGLE_TOKENS = 13
"""As in the contamination studies of language models (Brown et al., arXiv 2005.14165)."""
_OVERLAP_SHARE = 0.8

Loss = Callable[[Sequence[int]], float]
"""Mean negative log-likelihood, in nats a token, of token ids."""


def require_varied(samples: Sequence[Sample], name: str, widest_inputs: int) -> None:
    """Samples must differ, and be enough for the widest layer's Hessian [inputs, inputs] to have full rank.

    Raises PreparationError(UnusableCalibration).
    """
    repeated = len(samples) - len({normal(sample.text) for sample in samples})
    if repeated > MAX_ODD_SHARE * len(samples):
        raise _unusable(f"{name}: {repeated} of {len(samples)} samples repeat others")
    constant = [sample for sample in samples if _is_constant(sample)]
    if len(constant) > MAX_ODD_SHARE * len(samples):
        raise _unusable(
            f"{name}: {len(constant)} of {len(samples)} samples are one thing over and over, such as line "
            f"{constant[0].line}"
        )
    tokens = sum(len(sample.ids) for sample in samples)
    if tokens < widest_inputs:
        raise _unusable(
            f"{name} has {tokens} tokens, fewer than the widest layer has inputs ({widest_inputs}): "
            "its statistics would be singular"
        )


def _is_constant(sample: Sample) -> bool:
    """Half of the tokens are one and the same, or the tokens are few for the length."""
    counts = Counter(sample.ids)
    return counts.most_common(1)[0][1] * 2 > len(sample.ids) or 2 * len(counts) ** 2 < len(sample.ids)


def require_meaningful(samples: Sequence[Sample], name: str, loss: Loss) -> float:
    """Text means something to the model where the order of its tokens does: shuffled, it must surprise the model more.

    That holds in any language and for any model that can speak, and needs no dictionary.

    Returns: what the order is worth in the mean, nats a token. Raises PreparationError(UnusableCalibration).
    """
    step = max(1, len(samples) // _CHECKED_SAMPLES)
    checked = samples[::step][:_CHECKED_SAMPLES]
    worth = [_order_nats(sample, loss) for sample in checked]
    random_text = [sample for sample, nats in zip(checked, worth, strict=True) if nats < MIN_ORDER_NATS]
    mean = sum(worth) / len(worth)
    if len(random_text) > MAX_ODD_SHARE * len(checked):
        raise _unusable(
            f"{name}: {len(random_text)} of {len(checked)} checked samples look random to the model, such as line "
            f"{random_text[0].line} (shuffling their tokens costs less than {MIN_ORDER_NATS} nats a token, "
            f"{mean:.2f} in the mean)"
        )
    return mean


def _order_nats(sample: Sample, loss: Loss) -> float:
    ids = list(sample.ids[:_CHECKED_TOKENS])
    shuffled = ids[:1] + random.Random(sample.line).sample(ids[1:], len(ids) - 1)
    return loss(shuffled) - loss(ids)


def _unusable(what: str) -> PreparationError:
    return PreparationError(
        Reason.UNUSABLE_CALIBRATION, f"{what}. Calibrate on text of your own business, as users write it"
    )


def require_held_out(calibration: Sequence[Sample], evaluation: Sequence[Sample]) -> None:
    """No held-out text may come from the calibration text; what many calibration samples share (a system prompt) may.

    Raises PreparationError(UnusableEvaluation).
    """
    texts = {normal(sample.text): sample.line for sample in calibration}
    counts = Counter(shingle for sample in calibration for shingle in _shingles(sample))
    common = max(2, len(calibration) // 20)
    for sample in evaluation:
        twin = texts.get(normal(sample.text))
        own = [shingle for shingle in _shingles(sample) if counts[shingle] <= common]
        known = sum(shingle in counts for shingle in own)
        if twin is not None or known > _OVERLAP_SHARE * max(len(own), 1):
            where = f" (its line {twin})" if twin is not None else ""
            raise PreparationError(
                Reason.UNUSABLE_EVALUATION,
                f"line {sample.line} of the evaluation text is in the calibration text too{where}: "
                "quality is measured on text that was held out",
            )


def _shingles(sample: Sample) -> set[tuple[int, ...]]:
    ids = sample.ids
    return {ids[start : start + _SHINGLE_TOKENS] for start in range(len(ids) - _SHINGLE_TOKENS + 1)}


def normal(text: str) -> str:
    """The same for texts that differ in case and white space only."""
    return " ".join(text.casefold().split())
