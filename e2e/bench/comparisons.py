"""What a benchmark's result says, as rows of one table. Pure: a result is the JSON object that the benchmark prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Result = Mapping[str, Any]


class Row(NamedTuple):
    """One comparison.

    Attributes:
        product: what of ours was measured.
        peer: what it was measured against.
        shown: the figure, with its unit.
        goal: in the same unit; empty without one.
        holds: None without a goal.
        ratio: how often better than the peer, for the plot; None where the figure isn't one.
        goal_ratio: the goal in the same terms.
    """

    product: str
    peer: str
    shown: str
    goal: str = ""
    holds: bool | None = None
    ratio: float | None = None
    goal_ratio: float | None = None


def better(product: str, peer: str, ratio: float, goal: float | None = None) -> Row:
    """Ours over the peer's; more is better."""
    if goal is None:
        return Row(product, peer, f"{ratio:.3g} x", ratio=ratio)
    return Row(product, peer, f"{ratio:.3g} x", f"{goal:.3g} x", ratio >= goal, ratio, goal)


def share(product: str, peer: str, value: float, most: float) -> Row:
    """Ours as a share of the peer's; less is better."""
    return Row(product, peer, f"{value:.3g} of it", f"at most {most:.3g}", value <= most, 1 / value, 1 / most)


def at_most(product: str, peer: str, value: float, most: float, unit: str) -> Row:
    return Row(product, peer, f"{value:.3g} {unit}", f"at most {most:.3g} {unit}", value <= most)


def _decode(result: Result) -> Iterator[Row]:
    models = {"": "the example model", "width_1024_float32": "width 1,024, fp32", "width_1024_bfloat16": "same, bf16"}
    peers = {"over_transformers": "transformers, static batches", "over_vllm": "vLLM, CPU build"}
    for place, model in models.items():
        found = result.get(place, {}) if place else result
        for key, peer in peers.items():
            if key in found:
                yield better(f"16 requests, {model}: tokens/s", peer, found[key]["ratio"], found[key]["goal"])


def _levels(result: Result) -> Iterator[Row]:
    yield better("a level change to all pods", "kubelets left alone", result["ratio"], result["goal"])


def _sampler(result: Result) -> Iterator[Row]:
    for name, found in result["compared"].items():
        kind, vocabulary = name.split("_")
        goal = result["goal"] if kind == "realistic" else None
        yield better(
            f"sampling, {kind} logits, vocabulary {int(vocabulary):,}", "transformers' processors", found["ratio"], goal
        )


_SPECULATIVE = {
    "over_assisted_generation": ("greedy", "transformers' assisted generation"),
    "over_generate": ("greedy", "transformers' generate()"),
    "sampled_top_p_1.0": ("sampled", "plain decoding"),
    "sampled_top_p_0.9": ("sampled, top_p 0.9", "plain decoding"),
    "batch_4": ("batch 4, greedy", "plain decoding"),
    "share_of_bound": ("greedy", "the bound of its own acceptance"),
    "context_1500": ("contexts of 1,500 tokens", "plain decoding"),
    "context_2500": ("contexts of 2,500 tokens", "plain decoding"),
    "useless_draft": ("a useless draft", "plain decoding"),
}


def _speculative(result: Result) -> Iterator[Row]:
    yield better("speculation, batch 1, greedy", "plain decoding", result["ratio"], result["goal"])
    for key, (what, peer) in _SPECULATIVE.items():
        if key in result:
            yield better(f"speculation, {what}", peer, result[key]["ratio"], result[key]["goal"])


def _early_exit(result: Result) -> Iterator[Row]:
    peers = {"full": "all layers", "onnxruntime": "ONNX Runtime", "pipeline": "transformers' pipeline"}
    for name, ratio in result["over"][result["clock"]].items():
        yield better("texts/s with early exits", peers.get(name, name), ratio, result["goals"][name])


def _subgraphs(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    yield share("bytes of six tasks, one in memory", "all in memory", result["share"], goals["share"])
    cold = result["cold_ms_over_resident"]
    yield at_most("first request of a cold task", "a resident one", cold, goals["cold_ms"], "ms longer")


def _batching(result: Result) -> Iterator[Row]:
    """A quick run's few computed prompts have no 99th percentile."""
    goals = result["goals"]
    replays = [
        found["over"]
        for law in result.values()
        if isinstance(law, Mapping) and {"modelled", "computed"} <= law.keys() and law is not result.get("packed")
        for found in ((law["modelled"],) if result.get("quick") else (law["modelled"], law["computed"]))
    ]
    of = "of a heavy-tailed load" + (f", the worst of {len(replays)} replays" if len(replays) > 1 else "")
    peers = {"fixed": "fixed batches of 8", "queue": "a token-budget queue"}
    for key, most in goals.items():
        short, _, percentile = key.partition("_")
        if short in peers:
            yield share(f"{percentile.upper()} {of}", peers[short], max(over[key] for over in replays), most)
    waste = max(over["padding_waste"] for over in replays)
    yield at_most("padding", "no padding", 100 * waste, 100 * goals["padding_waste"], "%")


def _kv_reuse(result: Result) -> Iterator[Row]:
    goals = result["goals"]
    for turn in ("turn_2", "turn_4"):
        if turn in result:
            what = f"time to first token, {turn.replace('_', ' ')} of a conversation"
            yield share(what, "computing it", result[turn]["ratio"], goals[turn])


def _streaming(result: Result) -> Iterator[Row]:
    for name, goal in result["goals"].items():
        form, language = name.split()
        ratio = result["ratios"][f"{form} {language}, one by one"]
        yield better(f"bytes of a stream, {form}, {language}", "plain events", ratio, goal)


def _quantised(result: Result) -> Iterator[Row]:
    for rows in (1, 8):
        found = result[f"decode_{rows}"]
        for kind in ("int4", "int8"):
            for full in ("fp32", "bf16"):
                goal = result["goal"] if (kind, full) == ("int4", "fp32") else None
                what = f"decoding at width 2,048, {rows} row{'s' * (rows > 1)}, {kind.upper()}"
                yield better(what, full, found[f"{kind} over {full}"], goal)


def _operator(result: Result) -> Iterator[Row]:
    large = result["large"]
    count, cold, change = large["policies"], large["cold"], large["change"]
    yield better(
        f"{count} policies until all run", "a bare loop that applies the same", result["ratio"], result["goal"]
    )
    for what, phase in (("from cold", cold), ("after a change of all", change)):
        again = phase["rest_writes"]
        yield at_most(f"writes of a second reconcile, {what}", "none", again, 0, "writes")
        yield at_most(f"API requests at rest, {what}", "none", phase["rest_requests_a_minute"], 60, "a minute")
        yield at_most(f"resident memory, {what}", "none", phase["memory_mib"], 150, "MiB")


def _any(result: Result) -> Iterator[Row]:
    """Every object within that has a ratio and a goal."""
    name = str(result.get("name", ""))
    stack: list[tuple[str, Mapping[str, Any]]] = [("", result)]
    while stack:
        path, node = stack.pop(0)
        if isinstance(node.get("ratio"), int | float) and isinstance(node.get("goal"), int | float):
            peer = str(node.get("peer", path or "its peer"))
            yield better(str(node.get("product", name)), peer, node["ratio"], node["goal"])
        stack += [
            (f"{path} {key}".strip().replace("_", " "), value)
            for key, value in node.items()
            if isinstance(value, Mapping)
        ]


_READERS: dict[str, Callable[[Result], Iterator[Row]]] = {
    "decode": _decode,
    "levels": _levels,
    "sampler": _sampler,
    "speculative": _speculative,
    "early_exit": _early_exit,
    "subgraphs": _subgraphs,
    "batching": _batching,
    "kv_reuse": _kv_reuse,
    "streaming": _streaming,
    "quantised": _quantised,
    "operator": _operator,
}


def rows(result: Result) -> list[Row]:
    """The rows of a result; one whose shape isn't known, or has changed, gives all that it calls ratio and goal."""
    try:
        found = list(_READERS.get(str(result.get("name")), _any)(result))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        found = []
    return found or list(_any(result))
