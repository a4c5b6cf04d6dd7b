"""Speculative decoding of the example pair at fp32 on one thread: the engine over its own plain decoding and peers.

Prompts are speeches of the held-out plays in chat form, each answered with up to 96 tokens, whole requests timed (the
prompt included). Everything that is compared answers the same prompts in turn, and ratios are medians over them.
Own plain decoding is the same engine with requests that opt out. Peers: transformers' assisted generation on the same
pair, and its `generate()`. The default strategy is compared with the others; a draft of random weights and contexts
beyond what the draft was distilled for show what speculation costs where it doesn't pay.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from served_pair import ANSWER_TOKENS, MODELS, STRATEGIES, Served, serving
from stack import REPOSITORY
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(REPOSITORY / "e2e" / "models"))
import plays

GREEDY = {"temperature": 0.0}
WARM_UP_PROMPTS = 4


def compared(label: str, prompts: list[Any], contenders: dict[str, Callable[[Any], float]]) -> dict[str, float]:
    """Each contender's tokens a second on each prompt in turn; the median of the first one's ratio over each other."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for index, prompt in enumerate(prompts):
        names = list(contenders)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            rates[name].append(contenders[name](prompt))
    print(
        f"{label}: " + ", ".join(f"{n} {statistics.median(r):.0f}" for n, r in rates.items()) + " tokens/s", flush=True
    )
    first, *others = rates
    return {
        other: round(statistics.median(a / b for a, b in zip(rates[first], rates[other], strict=True)), 3)
        for other in others
    }


def over_plain(served: Served, label: str, prompts: list[list[list[int]]], sampling: dict[str, float]) -> float:
    """Speculation over plain decoding; each item is what is answered at once. The first ones warm up: an engine learns
    for its first few answers, and then serves for days."""
    for batch in prompts[:WARM_UP_PROMPTS]:
        for speculative in (True, False):
            served.answer(batch, speculative, sampling)
    contenders: dict[str, Callable[[Any], float]] = {
        "speculative": lambda batch: served.answer(batch, True, sampling).rate,
        "plain": lambda batch: served.answer(batch, False, sampling).rate,
    }
    return compared(label, prompts, contenders)["plain"]


@torch.inference_mode()
def generated(model: Any, ids: list[int], assistant: Any = None) -> float:
    """Tokens a second of transformers."""
    prompt, started = torch.tensor([ids]), time.perf_counter()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=ANSWER_TOKENS,
        do_sample=False,
        pad_token_id=0,
        assistant_model=assistant,
    )
    return (output.shape[1] - len(ids)) / (time.perf_counter() - started)


def reference(name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    model.generation_config.stop_strings = None  # the engine's requests carry none either
    return model


def share_of_bound(served: Served, prompts: list[list[int]]) -> dict[str, float]:
    """(E[accepted] + 1) / (k c + 1) from the engine's own figures, and how much of it decoding reaches."""
    pairs = [(served.answer([ids], True, GREEDY), served.answer([ids], False, GREEDY)) for ids in prompts]
    with_draft, plain = [run for run, _ in pairs], [run for _, run in pairs]
    steps = sum(run.steps for run in with_draft)
    plain_step = sum(run.decode_seconds for run in plain) / sum(run.steps for run in plain)
    drafted, accepted = (sum(getattr(run, name) for run in with_draft) / steps for name in ("drafted", "accepted"))
    cost = sum(run.draft_seconds for run in with_draft) / steps / drafted / plain_step
    bound = (accepted + 1) / (drafted * cost + 1)
    reached = statistics.median(a.tokens / a.decode_seconds / (b.tokens / b.decode_seconds) for a, b in pairs)
    figures = {"accepted_tokens": accepted, "drafted_tokens": drafted, "draft_cost": cost, "bound": bound}
    return {"ratio": round(reached / bound, 3), **{name: round(value, 3) for name, value in figures.items()}}


def useless_draft(folder: Path) -> Path:
    """The draft with random weights of the same shapes and sizes."""
    shutil.copytree(MODELS / "chat-draft", folder)
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    random = {
        name: torch.randn_like(tensor) * tensor.float().std().to(tensor.dtype) for name, tensor in weights.items()
    }
    save_file(random, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def held(goal: float, ratio: float, **more: Any) -> dict[str, Any]:
    return {"ratio": ratio, "goal": goal, "holds": ratio >= goal, **more}


def strategies_compared(served: Served, prompts: list[list[int]], sampling: dict[str, float]) -> dict[str, float]:
    """Each strategy's rate over plain decoding."""

    def with_strategy(name: str) -> Callable[[Any], float]:
        def rate(ids: list[int]) -> float:
            served.strategy = name
            return served.answer([ids], True, sampling).rate

        return rate

    contenders = {name: with_strategy(name) for name in STRATEGIES}
    for rate in contenders.values():
        for ids in prompts[:WARM_UP_PROMPTS]:
            rate(ids)
    ratios = compared(
        f"strategies at {sampling}",
        prompts,
        {"plain": lambda ids: served.answer([ids], False, sampling).rate, **contenders},
    )
    served.strategy = "CostModel"
    return {name: round(1 / ratio, 2) for name, ratio in ratios.items()}


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "chat")
    chats = plays.load_heldout_prompts(24)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    few = prompts[:: 4 if quick else 1]
    play = tokenizer.encode(next(iter(plays.load_heldout_text().values())), add_special_tokens=False)
    contexts = {
        length: [[play[start : start + length]] for start in range(0, 900, 300 if quick else 150)]
        for length in (1500, 2500)
    }
    chat, draft = reference("chat"), reference("chat-draft")
    with serving(MODELS / "chat-draft") as served:
        over = over_plain(served, "batch 1, greedy", [[ids] for ids in few], GREEDY)
        peers = compared(
            "peers, greedy",
            few,
            {
                "engine": lambda ids: served.answer([ids], True, GREEDY).rate,
                "assisted generation": lambda ids: generated(chat, ids, draft),
                "generate()": lambda ids: generated(chat, ids),
            },
        )
        sampled = {
            f"sampled_top_p_{top_p}": over_plain(
                served,
                f"batch 1, temperature 1, top_p {top_p}",
                [[ids] for ids in few],
                {"temperature": 1.0, "top_p": top_p},
            )
            for top_p in (1.0, 0.9)
        }
        fours = [prompts[start : start + 4] for start in range(0, 24, 8 if quick else 4)]
        batch = over_plain(served, "batch 4, greedy", fours, GREEDY)
        share = share_of_bound(served, few)
        long = {
            f"context_{length}": over_plain(served, f"context {length}, greedy", pieces, GREEDY)
            for length, pieces in contexts.items()
        }
        strategies = {
            name: strategies_compared(served, few, sampling)
            for name, sampling in {"greedy": GREEDY, "sampled": {"temperature": 1.0}}.items()
        }
    with tempfile.TemporaryDirectory() as folder, serving(useless_draft(Path(folder) / "useless")) as served:
        useless = over_plain(served, "useless draft, greedy", [[ids] for ids in few], GREEDY)
    return {
        **held(2.2, over),
        "over_assisted_generation": held(2.0, peers["assisted generation"]),
        "over_generate": held(5.0, peers["generate()"]),
        **{name: held(2.2, ratio) for name, ratio in sampled.items()},
        "batch_4": held(1.3, batch),
        "share_of_bound": held(0.85, share.pop("ratio"), **share),
        **{name: held(0.95, ratio) for name, ratio in long.items()},
        "useless_draft": held(0.95, useless),
        "strategies": strategies,
    }
