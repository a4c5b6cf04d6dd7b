"""Tokens a second at width 2,048 in the engine's own decoder, one thread: INT4 (GPTQ, groups of 128) and INT8 over full
precision, for 1 and 8 rows.

One model of 4 layers with random weights, written as three checkpoints. Full precision is fp32, which is what the
engine takes on a CPU; bf16 is measured beside it. Rounds alternate between all of them; ratios are medians over rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from sixfold_runtime.engine import gptq_layout
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.decoder import Decoder
from sixfold_runtime.engine.decoder_shape import decoder_shape, expected_tensors
from sixfold_runtime.engine.forward import DecoderForward, Forward

GOAL = 2.0
ROWS = (1, 8)
PROMPT_TOKENS = 64
GROUP = 128
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=512,
    max_position_embeddings=1024,
    architectures=["LlamaForCausalLM"],
)
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
INT8: dict[str, Any] = {"quant_method": "sixfold-int8"}


def write_checkpoints(folder: Path) -> None:
    """`int4`, `full` (what the 4-bit integers stand for) and `int8` (that, rounded by output channel)."""
    torch.manual_seed(0)
    shape = decoder_shape(CONFIG, ["LlamaForCausalLM"])
    assert shape is not None
    sets: dict[str, dict[str, torch.Tensor]] = {"int4": {}, "full": {}, "int8": {}}
    for name, size in expected_tensors(shape).items():
        if len(size) == 1 or not name.startswith("model.layers."):
            tensor = torch.ones(size) if len(size) == 1 else torch.randn(size)
            for tensors in sets.values():
                tensors[name] = tensor.half()
        else:
            sets["int4"] |= random_int4(name.removesuffix(".weight"), *size)
    save(folder / "int4", sets["int4"])
    store = TensorStore(folder / "int4")
    for module in (name.removesuffix(".qweight") for name in store.names if name.endswith(".qweight")):
        weight = gptq_layout.read(store, module, GPTQ).dequantised()
        scale = weight.abs().amax(1) / 127
        sets["full"][f"{module}.weight"] = weight.half()
        sets["int8"] |= {
            f"{module}.weight": (weight / scale[:, None]).round().to(torch.int8),
            f"{module}.weight_scale": scale,
        }
    save(folder / "full", sets["full"])
    save(folder / "int8", sets["int8"])


def random_int4(module: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """A symmetric linear whose weights have about the variance that keeps activations as they are."""
    groups = inputs // GROUP
    return {
        f"{module}.qweight": torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int32),
        f"{module}.qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": (torch.rand(groups, outputs) + 0.5).mul(inputs**-0.5 / 4.6).half(),
        f"{module}.g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def load(folder: Path, quantization: dict[str, Any] | None, dtype: torch.dtype) -> DecoderForward:
    shape = decoder_shape(CONFIG, ["LlamaForCausalLM"])
    assert shape is not None
    return DecoderForward(Decoder(shape, CONFIG, TensorStore(folder), quantization, dtype, CPU))


def measure(forward: Forward, rows: int, steps: int) -> tuple[float, float]:
    """(prompt tokens a second, generated tokens a second), greedy."""
    prompts = torch.randint(0, CONFIG.vocab_size, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(rows))
    cache = forward.new_cache(rows)
    started = time.perf_counter()
    logits = forward(prompts.tolist(), cache)
    prefilled = time.perf_counter()
    for _ in range(steps):
        logits = forward([[token] for token in logits.argmax(1).tolist()], cache)
    if not logits.isfinite().all():
        raise SystemExit("the random model gave values that are not finite: its speed says nothing")
    return rows * PROMPT_TOKENS / (prefilled - started), rows * steps / (time.perf_counter() - prefilled)


def run(quick: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_checkpoints(folder)
        forwards = {
            "fp32": load(folder / "full", None, torch.float32),
            "bf16": load(folder / "full", None, torch.bfloat16),
            "int4": load(folder / "int4", GPTQ, torch.bfloat16),
            "int8": load(folder / "int8", INT8, torch.float32),
        }
        return compare(forwards, rounds=3 if quick else 7, steps=8 if quick else 24)


def compare(forwards: dict[str, DecoderForward], rounds: int, steps: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "weight_megabytes": {name: round(forward.weight_bytes / 1e6) for name, forward in forwards.items()}
    }
    print(f"weights, MB: {result['weight_megabytes']}")
    ratios = []
    for rows in ROWS:
        for forward in forwards.values():
            measure(forward, rows, 2)
        speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in forwards}
        for _ in range(rounds):
            for name, forward in forwards.items():
                speeds[name].append(measure(forward, rows, steps))
        for phase, kind in enumerate(("prompt", "decode")):
            medians = {name: statistics.median(both[phase] for both in pairs) for name, pairs in speeds.items()}
            over = {
                f"{name} over {full}": statistics.median(
                    quantised[phase] / plain[phase] for quantised, plain in zip(speeds[name], speeds[full], strict=True)
                )
                for name in ("int4", "int8")
                for full in ("fp32", "bf16")
            }
            shown = ", ".join(f"{name} {value:.1f}" for name, value in medians.items())
            print(f"{rows} rows, {kind}: tokens/s {shown}; " + ", ".join(f"{n} {v:.2f}" for n, v in over.items()))
            result[f"{kind}_{rows}"] = {
                "tokens_per_second": {name: round(value, 1) for name, value in medians.items()},
                **{name: round(value, 2) for name, value in over.items()},
            }
            if kind == "decode":
                ratios.append(over["int4 over fp32"])
    return {"ratio": round(min(ratios), 2), "goal": GOAL, **result}
