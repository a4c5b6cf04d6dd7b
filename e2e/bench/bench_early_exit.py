"""Texts a second with early exit, from text to label: over the same engine through all layers, transformers' pipeline,
and ONNX Runtime on the same model.

2,000 held-out texts in their natural mix of lengths: film reviews, and as many of three domains that nothing was
calibrated on. The model is the example variant as `sixfold prepare` makes it. Pipeline and ONNX Runtime get the batch
size at which each is the fastest on a part of the texts; ONNX Runtime gets texts sorted by length, the engine and the
pipeline as they come. All compute with the same number of threads. Rounds alternate between all of them; ratios are
medians over rounds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from onnx_venv import Onnx, OnnxError
from stack import REPOSITORY, model_folders
from transformers import pipeline

from sixfold_runtime.engine.device import set_threads
from sixfold_runtime.sdk import Classification, InferenceEngine

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))

from prepared import prepared_example
from reviews import LABELS, Review, splits

TEXTS, QUICK_TEXTS, TUNING_TEXTS = 2000, 400, 200
BATCHES = (1, 4, 8, 16, 32, 64)
A_CALL = 250
EXITS_OVER_FULL, SHARE_OF_LAYERS_SAVED, OVER_PIPELINE, OVER_ONNX = 1.5, 0.9, 4.0, 1.3
OTHERS = ("amazon", "tweets", "nyt")

Labeller = Callable[[Sequence[str]], list[str]]


def run(quick: bool) -> dict[str, Any]:
    threads = set_threads()
    model_folders()  # builds what is missing
    folder = prepared_example()
    reviews = mixed(QUICK_TEXTS if quick else TEXTS)
    with InferenceEngine(folder, device="cpu") as engine:
        facts, full_labels = qualities(engine, reviews)
        contenders: dict[str, Labeller] = {
            "exits": lambda texts: [answer.label for answer in ask(engine.early_exit, texts)],
            "full": lambda texts: [answer.label for answer in ask(engine.classify, texts)],
        }
        peers, stop = open_peers(folder, [review.text for review in reviews], threads)
        facts["batch_sizes"] = {name: batch for name, (_, batch) in peers.items()}
        contenders |= {name: labeller for name, (labeller, _) in peers.items()}
        try:
            rates = measure(contenders, [review.text for review in reviews], full_labels, rounds=1 if quick else 3)
        finally:
            stop()
    return judged(rates, facts) | {"threads": threads}


def mixed(count: int) -> list[Review]:
    """Film reviews and, in equal parts, texts of the other domains, in one random order."""
    domains = splits()
    films = list(domains["heldout"])[: count - 3 * (count // 6)]
    each = (count - len(films)) // len(OTHERS)
    texts = films + [review for name in OTHERS for review in domains[name][:each]]
    random.Random(0).shuffle(texts)
    return texts


def ask(labeller: Callable[[list[str]], list[Classification]], texts: Sequence[str]) -> list[Classification]:
    parts = [list(texts[start : start + A_CALL]) for start in range(0, len(texts), A_CALL)]
    return [answer for part in parts for answer in labeller(part)]


def qualities(engine: InferenceEngine, reviews: Sequence[Review]) -> tuple[dict[str, Any], list[str]]:
    """What exits do to the texts' labels, and the full model's labels."""
    texts = [review.text for review in reviews]
    full, early = ask(engine.classify, texts), ask(engine.early_exit, texts)
    truth = [LABELS[review.label] for review in reviews]
    layers = [answer.layers or 0 for answer in early]
    facts = {
        "texts": len(texts),
        "layers": full[0].layers,
        "mean_layers": round(statistics.mean(layers), 3),
        "exits": dict(sorted(Counter(layers).items())),
        "accuracy_full": round(share(answer.label == label for answer, label in zip(full, truth, strict=True)), 4),
        "accuracy": round(share(answer.label == label for answer, label in zip(early, truth, strict=True)), 4),
        "disagreement": round(share(a.label != b.label for a, b in zip(full, early, strict=True)), 4),
    }
    print(facts, flush=True)
    return facts, [answer.label for answer in full]


def share(hits: Any) -> float:
    return statistics.mean(float(hit) for hit in hits)


def open_peers(
    folder: Path, texts: Sequence[str], threads: int
) -> tuple[dict[str, tuple[Labeller, int]], Callable[[], None]]:
    """Labellers at their best batch sizes, and what ends them."""
    tuning = texts[:TUNING_TEXTS]
    classifier = pipeline("text-classification", model=str(folder), device="cpu")

    def piped(texts: Sequence[str], batch: int) -> list[str]:
        return [answer["label"] for answer in classifier(list(texts), batch_size=batch, truncation=True)]

    peers: dict[str, tuple[Labeller, int]] = {}
    best = fastest("pipeline", piped, tuning)
    peers["pipeline"] = lambda texts: piped(texts, best), best
    try:
        onnx = Onnx(folder, threads)
    except OnnxError as error:
        print(f"onnxruntime: left out, {error}", flush=True)
        return peers, lambda: None
    sorted_best = fastest("onnxruntime", lambda texts, batch: onnx.label(texts, batch)[1], tuning)
    peers["onnxruntime"] = lambda texts: onnx.label(texts, sorted_best)[1], sorted_best
    return peers, onnx.stop


def fastest(name: str, labeller: Callable[[Sequence[str], int], list[str]], texts: Sequence[str]) -> int:
    seconds: dict[int, float] = {}
    for _ in range(2):
        for batch in BATCHES:
            began = time.perf_counter()
            labeller(texts, batch)
            seconds[batch] = min(seconds.get(batch, float("inf")), time.perf_counter() - began)
    print(f"{name}: " + ", ".join(f"batch {b} {len(texts) / s:.0f}/s" for b, s in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)


def measure(
    contenders: dict[str, Labeller], texts: Sequence[str], full_labels: list[str], rounds: int
) -> dict[str, list[float]]:
    """Texts a second of each, round by round. Those that run through all layers must agree with the engine."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, labeller in contenders.items():
            began = time.perf_counter()
            labels = labeller(texts)
            rates[name].append(len(texts) / (time.perf_counter() - began))
            differ = share(a != b for a, b in zip(labels, full_labels, strict=True))
            assert name == "exits" or differ < 0.005, f"{name} labels {differ:.1%} of the texts otherwise"
        print(f"round {number + 1}: " + ", ".join(f"{n} {r[-1]:.0f}/s" for n, r in rates.items()), flush=True)
    return rates


def judged(rates: dict[str, list[float]], facts: dict[str, Any]) -> dict[str, Any]:
    over = {
        name: statistics.median(ours / theirs for ours, theirs in zip(rates["exits"], found, strict=True))
        for name, found in rates.items()
        if name != "exits"
    }
    goals = {
        "full": max(EXITS_OVER_FULL, SHARE_OF_LAYERS_SAVED * facts["layers"] / facts["mean_layers"]),
        "pipeline": OVER_PIPELINE,
        "onnxruntime": OVER_ONNX,
    }
    return {
        # The goal that is the hardest to reach decides.
        "ratio": round(min(value / goals[name] for name, value in over.items()), 3),
        "goal": 1.0,
        "over": {name: round(value, 3) for name, value in over.items()},
        "goals": {name: round(value, 3) for name, value in goals.items()},
        "texts_per_second": {name: [round(rate, 1) for rate in found] for name, found in rates.items()},
        **facts,
    }
