"""Texts a second with early exit, from text to label: over the same engine through all layers, transformers' pipeline,
and ONNX Runtime on the same model.

2,000 held-out texts in their natural mix of lengths: film reviews, and as many of three domains that nothing was
calibrated on. The model is the example variant as `sixfold prepare` makes it. Pipeline and ONNX Runtime get the batch
size at which each is the fastest on a part of the texts; ONNX Runtime gets texts sorted by length, the engine and the
pipeline as they come. All compute with the same number of threads. Rounds alternate between all of them; ratios are
medians over rounds. With one thread, ratios are of CPU time: what else the machine does would decide otherwise.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx_venv import Onnx
from peer import PeerError
from stack import REPOSITORY, model_folders
from transformers import pipeline

from sixfold_runtime.engine.device import set_threads
from sixfold_runtime.sdk import Classification, InferenceEngine

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))

from prepared import prepared_example
from reviews import LABELS, Review, splits

TEXTS, QUICK_TEXTS, TUNING_TEXTS = 2000, 400, 128
BATCHES = (1, 4, 8, 16, 32, 64)
A_CALL = 250
EXITS_OVER_FULL, SHARE_OF_LAYERS_SAVED, OVER_PIPELINE, OVER_ONNX = 1.5, 0.9, 4.0, 1.3
OTHERS = ("amazon", "tweets", "nyt")


@dataclass(frozen=True)
class Labelled:
    """Labels of some texts, and what they took."""

    labels: list[str]
    wall_seconds: float
    cpu_seconds: float


Labeller = Callable[[Sequence[str]], Labelled]


def timed(labeller: Callable[[Sequence[str]], list[str]]) -> Labeller:
    """Of one that computes in this process."""

    def label(texts: Sequence[str]) -> Labelled:
        wall, cpu = time.perf_counter(), time.process_time()
        labels = labeller(texts)
        return Labelled(labels, time.perf_counter() - wall, time.process_time() - cpu)

    return label


def run(quick: bool) -> dict[str, Any]:
    threads = set_threads()
    model_folders()  # builds what is missing
    folder = prepared_example()
    reviews = mixed(QUICK_TEXTS if quick else TEXTS)
    with InferenceEngine(folder, device="cpu") as engine:
        facts, full_labels = qualities(engine, reviews)
        contenders: dict[str, Labeller] = {
            "exits": timed(lambda texts: [answer.label for answer in ask(engine.early_exit, texts)]),
            "full": timed(lambda texts: [answer.label for answer in ask(engine.classify, texts)]),
        }
        peers, stop = open_peers(folder, [review.text for review in reviews], threads)
        facts["batch_sizes"] = {name: batch for name, (_, batch) in peers.items()}
        contenders |= {name: labeller for name, (labeller, _) in peers.items()}
        try:
            rounds = measure(contenders, [review.text for review in reviews], full_labels, rounds=1 if quick else 3)
        finally:
            stop()
    return judged(rounds, facts, threads)


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

    def piped(batch: int) -> Labeller:
        return timed(
            lambda texts: [answer["label"] for answer in classifier(list(texts), batch_size=batch, truncation=True)]
        )

    peers: dict[str, tuple[Labeller, int]] = {}
    best = fastest("pipeline", piped, tuning)
    peers["pipeline"] = piped(best), best
    try:
        onnx = Onnx(folder, threads)
    except PeerError as error:
        print(f"onnxruntime: left out, {error}", flush=True)
        return peers, lambda: None

    def by_onnx(batch: int) -> Labeller:
        return lambda texts: Labelled(*onnx.label(texts, batch))

    best = fastest("onnxruntime", by_onnx, tuning)
    peers["onnxruntime"] = by_onnx(best), best
    return peers, onnx.stop


def fastest(name: str, labeller: Callable[[int], Labeller], texts: Sequence[str]) -> int:
    """The batch size that takes the least CPU time."""
    seconds = {batch: labeller(batch)(texts).cpu_seconds for batch in BATCHES}
    print(f"{name}: " + ", ".join(f"batch {b} {len(texts) / s:.0f}/s" for b, s in seconds.items()), flush=True)
    return min(seconds, key=seconds.__getitem__)


def measure(
    contenders: dict[str, Labeller], texts: Sequence[str], full_labels: list[str], rounds: int
) -> dict[str, list[Labelled]]:
    """What each took, round by round. Those that run through all layers must agree with the engine."""
    found: dict[str, list[Labelled]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, labeller in contenders.items():
            labelled = labeller(texts)
            differ = share(a != b for a, b in zip(labelled.labels, full_labels, strict=True))
            assert name == "exits" or differ < 0.005, f"{name} labels {differ:.1%} of the texts otherwise"
            found[name].append(labelled)
        shown = (
            f"{n} {len(texts) / r[-1].wall_seconds:.0f} ({len(texts) / r[-1].cpu_seconds:.0f})"
            for n, r in found.items()
        )
        print(f"round {number + 1}, texts a second (of CPU time): " + ", ".join(shown), flush=True)
    return found


def judged(found: dict[str, list[Labelled]], facts: dict[str, Any], threads: int) -> dict[str, Any]:
    clocks = {"wall": lambda run: run.wall_seconds, "cpu": lambda run: run.cpu_seconds}
    rates = {
        clock: {name: [facts["texts"] / seconds(run) for run in runs] for name, runs in found.items()}
        for clock, seconds in clocks.items()
    }
    over = {
        clock: {
            name: round(statistics.median(o / t for o, t in zip(own["exits"], theirs, strict=True)), 3)
            for name, theirs in own.items()
            if name != "exits"
        }
        for clock, own in rates.items()
    }
    goals = {
        "full": max(EXITS_OVER_FULL, SHARE_OF_LAYERS_SAVED * facts["layers"] / facts["mean_layers"]),
        "pipeline": OVER_PIPELINE,
        "onnxruntime": OVER_ONNX,
    }
    clock = "cpu" if threads == 1 else "wall"
    return {
        # The goal that is the hardest to reach decides.
        "ratio": round(min(value / goals[name] for name, value in over[clock].items()), 3),
        "goal": 1.0,
        "clock": clock,
        "over": over,
        "goals": {name: round(value, 3) for name, value in goals.items()},
        "texts_per_second": {c: {n: [round(v, 1) for v in r] for n, r in own.items()} for c, own in rates.items()},
        "threads": threads,
        **facts,
    }
