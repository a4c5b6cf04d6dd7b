"""Does a draft pay for its target? Tokenizers, seconds of a decode step, parameters, and what they say on text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sixfold_api.precision import (
    DRAFT_KL_LIMIT,
    MAX_DRAFT_LATENCY_RATIO,
    MAX_DRAFT_PARAMETER_RATIO,
    DraftReport,
    TextSource,
)
from sixfold_api.scalars import Task
from sixfold_runtime.prepare.evaluate import WINDOW_TOKENS, CausalScorer, decimal, divergence_sum, load_weights
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import CONFIG, GENERATION_CONFIG, TOKENIZER, read_json
from sixfold_runtime.prepare.texts import TextReader, locate, read_samples, windows

_CONTEXT_TOKENS = 128
_STEPS = 24
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def require_same_tokenizer(draft: Path, target: Path) -> None:
    """One tokenizer for both: tokens with their ids, merges and what else decides about ids, and special ids.

    Embeddings may have more rows than there are tokens: models of one family pad them differently.

    Raises PreparationError(TokenizerMismatch).
    """
    ours, theirs = (read_json(folder / TOKENIZER, Reason.TOKENIZER_MISMATCH) for folder in (draft, target))
    if _vocabulary(ours) != _vocabulary(theirs):
        mine, other = _vocabulary(ours), _vocabulary(theirs)
        odd = sorted(mine.items() ^ other.items(), key=lambda item: (item[1], item[0]))[0]
        raise _mismatch(f"token {odd[0]!r} with id {odd[1]} is in one of them only")
    for part in ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if _deciding(ours.get(part)) != _deciding(theirs.get(part)):
            raise _mismatch(f"their `{part}` in {TOKENIZER} differs, so that text is cut differently")
    for name in _SPECIAL_IDS:
        mine_ids, other_ids = _special(draft, name), _special(target, name)
        if mine_ids != other_ids:
            raise _mismatch(f"{name} is {sorted(mine_ids)} for the draft and {sorted(other_ids)} for the target")


def _mismatch(what: str) -> PreparationError:
    return PreparationError(
        Reason.TOKENIZER_MISMATCH,
        f"draft and target have different tokenizers: {what}. A draft proposes token ids: take one of "
        "the target's family",
    )


def _vocabulary(content: dict[str, Any]) -> dict[str, int]:
    """Token -> id, added tokens included."""
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: tokens with scores, by position
        vocabulary = {entry[0]: index for index, entry in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    return {**vocabulary, **added}


def _deciding(part: Any) -> str:
    """A part of tokenizer.json for comparison; the vocabulary is compared with the added tokens, merges in one form."""
    if isinstance(part, dict):
        part = {key: value for key, value in part.items() if key != "vocab" or isinstance(value, list)}
        if isinstance(part.get("merges"), list):
            part["merges"] = [" ".join(pair) if isinstance(pair, list) else pair for pair in part["merges"]]
    return json.dumps(part, sort_keys=True)


def _special(folder: Path, name: str) -> set[int]:
    """What a model says in generation_config.json, else in config.json."""
    path = folder / GENERATION_CONFIG
    generation = read_json(path) if path.is_file() else {}
    value = generation[name] if generation.get(name) is not None else read_json(folder / CONFIG).get(name)
    return set() if value is None else set(value if isinstance(value, list) else [value])


def compare(
    draft: Path,
    target: Path,
    name: str,
    parameters: tuple[int, int],
    evaluation: TextSource,
    claims: Path,
    clock: Callable[[], float] = time.perf_counter,
) -> DraftReport:
    """Measure a draft against its target.

    Args:
        name: of the target's ModelVariant.
        parameters: of draft and target.

    Raises PreparationError: TokenizerMismatch, UnusableEvaluation, UnsupportedPrecision, NonFiniteWeights.
    """
    require_same_tokenizer(draft, target)
    reader = TextReader(target)
    samples = read_samples(
        locate(claims, evaluation), evaluation, reader, Reason.UNUSABLE_EVALUATION, labelled=False
    )  # fmt: skip
    models = [load_weights(folder, Task.GENERATION) for folder in (draft, target)]
    scorers = [CausalScorer(model) for model in models]
    text = windows(samples, min(WINDOW_TOKENS, *(model.context_tokens for model in models)))
    tokens = max(reader.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    kl = _mean_kl(scorers[1], scorers[0], text, tokens)
    latency = _latency_ratio(scorers, text[0], clock)
    ratio = parameters[0] / parameters[1]
    return DraftReport(
        target=name,
        latency_ratio=decimal(latency),
        parameter_ratio=decimal(ratio),
        kl=decimal(kl),
        warnings=warnings(latency, ratio, kl),
    )


def warnings(latency_ratio: float, parameter_ratio: float, kl: float) -> list[str]:
    """What keeps a draft from paying, with the figures."""
    found = []
    if latency_ratio > MAX_DRAFT_LATENCY_RATIO:
        found.append(
            f"a step of the draft takes {latency_ratio:.3f} of the target's; at most {MAX_DRAFT_LATENCY_RATIO} pays"
        )
    if parameter_ratio > MAX_DRAFT_PARAMETER_RATIO:
        found.append(
            f"the draft has {parameter_ratio:.3f} of the target's parameters; at most {MAX_DRAFT_PARAMETER_RATIO} pays"
        )
    if kl >= DRAFT_KL_LIMIT:
        found.append(f"the draft diverges by {kl:.3f} nats a token (KL) from the target; below {DRAFT_KL_LIMIT} pays")
    return found


def _mean_kl(target: CausalScorer, draft: CausalScorer, text: Sequence[Sequence[int]], tokens: int) -> float:
    """KL(target || draft) in nats a token over the ids that the tokenizer has.

    That is how the shorter of two padded outputs is padded: rows beyond the tokenizer have no mass.
    """
    total, count = 0.0, 0
    for ids in text:
        ours, theirs = (scorer.logits(ids)[:-1, :tokens].log_softmax(-1) for scorer in (target, draft))
        total += float(divergence_sum(ours, theirs))
        count += len(ours)
    return total / count


def _latency_ratio(scorers: Sequence[CausalScorer], prompt: Sequence[int], clock: Callable[[], float]) -> float:
    """Seconds of a decode step of the first over the second, alternating, with one thread.

    Of each the fastest step counts: what else runs on the node makes steps longer and never shorter.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        caches = [scorer.forward.new_cache(1) for scorer in scorers]
        for scorer, cache in zip(scorers, caches, strict=True):
            scorer.forward([list(prompt[:_CONTEXT_TOKENS])], cache)
        seconds: list[list[float]] = [[], []]
        for _ in range(_STEPS):
            for index, scorer in enumerate(scorers):
                began = clock()
                scorer.forward([[prompt[0]]], caches[index]).argmax().item()
                seconds[index].append(clock() - began)
        return min(seconds[0]) / min(seconds[1])
    finally:
        torch.set_num_threads(threads)
