"""Quantised linears, adapters and the pseudo-quantisation check, on checkpoints that GPTQModel and PEFT made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine import gptq_layout, lora
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.kernel_check import check_kernels, problem
from sixfold_runtime.engine.linear import Linear, build_linear
from sixfold_runtime.engine.loader import load

CPU = torch.device("cpu")
MAKER = Path(__file__).parent / "make_gptq_checkpoints.py"
TOKENS = [5, 9, 200, 31, 77, 140, 6, 250, 19, 3, 88, 164]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here"))]
CHECKPOINTS = ("plain", "layered", "row")
LAYER = "model.layers.0."
GROUPS = [
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
]


@pytest.fixture(scope="session")
def base(new_decoder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, in full precision."""
    folder = new_decoder(
        tmp_path_factory.mktemp("base"),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        initializer_range=0.1,
    )
    # transformers' tokenizer, which GPTQModel loads, takes no dictionaries here.
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.fixture(scope="session")
def gptq(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints that `make_gptq_checkpoints.py` makes of it."""
    folder = tmp_path_factory.mktemp("gptq")
    made = subprocess.run(
        [sys.executable, MAKER, base, folder], cwd=folder, env=dict(os.environ), capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return folder


@pytest.fixture(scope="session")
def int8(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with each linear rounded by output channel."""
    folder = tmp_path_factory.mktemp("int8") / "model"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1) / 127
        tensors[name] = (weight / scale[:, None]).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    set_quantization(folder, {"quant_method": "sixfold-int8"})
    return folder


def set_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def quantization_of(folder: Path) -> dict[str, Any]:
    quantization: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return quantization


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary] after each token, through the engine's own forward."""
    forward = make_forward(load(ServedModel(name="m", task=Task.GENERATION, path=str(folder)), CPU))
    assert forward.kernel == "sixfold"
    return forward([tokens], forward.new_cache(1), every_position=True)[0]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def full_names(names: tuple[str, ...]) -> list[str]:
    return [f"{LAYER}{name}" for name in names]


def stored_weight(store: TensorStore, name: str, quantization: dict[str, Any]) -> torch.Tensor:
    """float32 [out, in] that the checkpoint stands for."""
    if store.has(f"{name}.qweight"):
        return gptq_layout.read(store, name, quantization).dequantised()
    weight = store.get(f"{name}.weight").float()
    return weight * store.get(f"{name}.weight_scale")[:, None] if store.has(f"{name}.weight_scale") else weight


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_gives_the_logits_that_gptqmodel_computes(gptq: Path, name: str) -> None:
    """Both compute in bf16, so they agree to its precision and not to the bit."""
    theirs = load_file(gptq / name / "logits.safetensors")
    ours = logits(gptq / name, theirs["token_ids"][0].tolist())
    assert distance(ours, theirs["logits"]) < 0.03
    assert torch.equal(ours, logits(gptq / name, theirs["token_ids"][0].tolist()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_linears_compute_what_the_checkpoint_stands_for(gptq: Path, name: str, rows: int, device: str) -> None:
    """64 rows take the path that unpacks."""
    store, quantization = TensorStore(gptq / name), quantization_of(gptq / name)
    for group in GROUPS:
        names = full_names(group)
        linear = build_linear(store, names, quantization, torch.bfloat16, torch.device(device))
        weight = torch.cat([stored_weight(store, module, quantization) for module in names])
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert distance(linear(x.to(device)).cpu(), x.float() @ weight.t()) < 0.005
        part_of_wider = torch.cat((x, x), dim=1).to(device)[:, : weight.shape[1]]
        assert torch.equal(linear(part_of_wider), linear(x.to(device)))


def test_kernels_are_those_of_the_bits(gptq: Path) -> None:
    store, quantization = TensorStore(gptq / "layered"), quantization_of(gptq / "layered")
    built = [build_linear(store, full_names(group), quantization, torch.bfloat16, CPU) for group in GROUPS]
    assert [linear.kernel for linear in built] == ["int4", "int8-as-int4", "dense+int8-as-int4", "int4"]


def test_plain_int4_takes_at_most_30_percent_of_fp16(gptq: Path) -> None:
    store, quantization = TensorStore(gptq / "plain"), quantization_of(gptq / "plain")
    for group in GROUPS:
        linear = build_linear(store, full_names(group), quantization, torch.bfloat16, CPU)
        assert linear.weight_bytes <= 0.30 * 2 * linear.in_features * linear.out_features


def test_int8_stays_close_to_full_precision(base: Path, int8: Path) -> None:
    full, quantised = logits(base, TOKENS), logits(int8, TOKENS)
    assert distance(quantised, full) < 0.03
    assert torch.equal(quantised.argmax(1), full.argmax(1))


@pytest.mark.parametrize("device", DEVICES)
def test_int8_rows_do_not_depend_on_their_batch_mates(int8: Path, device: str) -> None:
    linear = build_linear(TensorStore(int8), full_names(GROUPS[0]), None, torch.float32, torch.device(device))
    assert linear.kernel == "int8"
    x = torch.randn(6, linear.in_features, generator=torch.Generator().manual_seed(1))
    x[1] *= 1000
    x[2] = 0
    x[3, 7] = float("nan")
    x[4, 7] = float("inf")
    x = x.to(device)
    together = linear(x).cpu()
    for row in (0, 1, 2, 5):
        assert torch.equal(together[row], linear(x[row : row + 1])[0].cpu())
    assert torch.equal(together[2], torch.zeros(linear.out_features))
    assert not together[3].isfinite().any() and not together[4].isfinite().any()


def checked(folder: Path, quantization: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Any:
    store = TensorStore(folder)
    linears: dict[tuple[str, ...], Linear] = {}
    for group in GROUPS:
        names = full_names(group)
        linears[tuple(names)] = build_linear(store, names, quantization, dtype, CPU)
    return check_kernels(linears, store, dtype, torch.float32, CPU)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantised_checkpoints_are_not_pretended(gptq: Path, name: str) -> None:
    found = checked(gptq / name, quantization_of(gptq / name))
    assert found.is_quantised, found.problem
    assert found.resident_bytes < 1.25 * found.expected_bytes
    assert found.measured == "", "linears this small cost their calls"


def test_loading_says_what_quantised_weights_are_worth(gptq: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load(ServedModel(name="m", task=Task.GENERATION, path=str(gptq / "layered")), CPU)
    assert "quantised linears (1 dense, 1 dense+int8-as-int4, 2 int4, 1 int8-as-int4)" in caplog.text


def test_a_plain_checkpoint_is_no_quantised_one(base: Path) -> None:
    assert "no linear" in checked(base, {}).problem


def test_weights_without_a_kernel_are_reported(gptq: Path, tmp_path: Path) -> None:
    """Groups of unequal size have no int4 kernel: right values, and the check says what they cost."""
    folder = tmp_path / "uneven"
    shutil.copytree(gptq / "row", folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("down_proj.g_idx")]:
        part = name.removesuffix("g_idx")
        for kind in ("qzeros", "scales"):
            tensors[part + kind] = torch.cat((tensors[part + kind], tensors[part + kind] / 2)).to(
                tensors[part + kind].dtype
            )
        tensors[name] = (torch.arange(256) > 100).int()
    save_file(tensors, folder / "model.safetensors")
    store, quantization = TensorStore(folder), quantization_of(folder)
    module = f"{LAYER}mlp.down_proj"
    linear = build_linear(store, [module], quantization, torch.bfloat16, CPU)
    assert linear.kernel == "dequantised"
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert distance(linear(x), x.float() @ stored_weight(store, module, quantization).t()) < 0.01
    assert "no kernel on this device" in checked(folder, quantization).problem


@pytest.mark.parametrize(
    ("resident", "seconds", "expected"),
    [(100, 1.0, ""), (400, 1.0, "held in another form"), (100, 3.0, "faster with full weights")],
)
def test_each_cause_has_its_reason(resident: int, seconds: float, expected: str) -> None:
    reason = problem({"int4": 4}, 4, resident, 100, 400, seconds, 2.0)
    assert expected in reason and bool(reason) == bool(expected)


def test_a_large_linear_is_measured_against_its_twin(tmp_path: Path) -> None:
    """With a clock that gives full precision a third of the speed."""
    size = 2048
    tensors = {
        "m.qweight": torch.randint(-(2**31), 2**31, (size // 8, size), dtype=torch.int32),
        "m.qzeros": torch.full((size // 128, size // 8), 0x77777777, dtype=torch.int32),
        "m.scales": torch.full((size // 128, size), 0.01, dtype=torch.float16),
        "m.g_idx": (torch.arange(size) // 128).int(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    store = TensorStore(tmp_path)
    linear = build_linear(store, ["m"], {}, torch.bfloat16, CPU)
    calls = [0]

    def clock() -> float:
        calls[0] += 1
        return calls[0] * (1.0 if calls[0] <= 40 else 3.0)

    found = check_kernels({("m",): linear}, store, torch.bfloat16, torch.float32, CPU, clock)
    assert found.measured == "m"
    assert found.is_quantised, found.problem
    assert found.full_seconds == pytest.approx(3 * found.quantised_seconds)


@pytest.fixture(autouse=True)
def _peft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PEFT finds GPTQModel it imports it, which takes 20 seconds, even for full-precision models."""
    monkeypatch.setitem(sys.modules, "gptqmodel", None)


def make_adapter(base: Path, folder: Path, **settings: Any) -> torch.Tensor:
    """Save a PEFT adapter with random factors; returns the logits that PEFT computes with it."""
    import peft
    import transformers

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings},
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    with torch.inference_mode():
        result: torch.Tensor = adapted(input_ids=torch.tensor([TOKENS])).logits[0]
    return result


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 32}},
    ],
    ids=["plain", "rslora", "patterns"],
)
def test_adapter_on_full_precision_is_merged(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    theirs = make_adapter(base, folder / lora.ADAPTER_FOLDER, **settings)
    ours = logits(folder, TOKENS)
    assert distance(ours, theirs) < 1e-5
    assert distance(ours, logits(base, TOKENS)) > 0.05


@pytest.mark.parametrize("kind", ["gptq", "int8"])
def test_adapter_on_quantised_weights_needs_retraining(
    base: Path, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    source, folder = request.getfixturevalue(kind), tmp_path / "model"
    shutil.copytree(source / "layered" if kind == "gptq" else source, folder)
    adapter = folder / lora.ADAPTER_FOLDER
    make_adapter(base, adapter)
    with pytest.raises(ModelLoadError, match=r"full precision.*sixfold prepare lora"):
        lora.open_store(folder)
    marker = adapter / lora.RETRAINED_FILE
    marker.write_text(json.dumps({"base_digest": "sha256:of others", "scheme": "GPTQ"}))
    with pytest.raises(ModelLoadError, match=r"other quantised weights.*sixfold prepare lora"):
        lora.open_store(folder)
    marker.write_text(json.dumps({"base_digest": lora.base_digest(TensorStore(folder)), "scheme": "GPTQ"}))
    store, quantization = lora.open_store(folder), quantization_of(folder)
    assert isinstance(store, lora.AdaptedStore)
    dtype = torch.bfloat16 if kind == "gptq" else torch.float32
    for group in (GROUPS[0], GROUPS[3]):
        names = full_names(group)
        linear = build_linear(store, names, quantization, dtype, CPU)
        assert "lora" in linear.kernel
        plain = [stored_weight(TensorStore(folder), module, quantization) for module in names]
        adapted = [
            weight + (store.updates[module].dense() if module in store.updates else 0)
            for module, weight in zip(names, plain, strict=True)
        ]
        x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(4)).to(dtype)
        assert distance(linear(x), x.float() @ torch.cat(adapted).t()) < 0.02
        assert distance(x.float() @ torch.cat(plain).t(), x.float() @ torch.cat(adapted).t()) > 0.05
    assert distance(logits(folder, TOKENS), logits(merged(base, store, quantization, tmp_path), TOKENS)) < 0.03


def merged(base: Path, store: lora.AdaptedStore, quantization: dict[str, Any], tmp_path: Path) -> Path:
    """The full-precision model with the weights that the store's quantised ones and its adapter stand for."""
    folder = tmp_path / "merged"
    shutil.copytree(base, folder)
    tensors = load_file(base / "model.safetensors")
    for module in (f"{LAYER}{name}" for group in GROUPS for name in group):
        weight = stored_weight(TensorStore(store.folder), module, quantization)
        update = store.updates.get(module)
        tensors[f"{module}.weight"] = (weight if update is None else weight + update.dense()).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"bias": "all"}, "bias: all"),
        ({"init_lora_weights": "pissa"}, "base weights changed"),
    ],
)
def test_adapters_that_would_be_computed_wrongly_are_refused(changes: dict[str, Any], expected: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **changes}
    with pytest.raises(ModelLoadError, match=expected):
        lora.require_supported(config, Path("adapter"))


def test_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    adapter = folder / lora.ADAPTER_FOLDER
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    name = f"base_model.model.{LAYER}mlp.down_proj.lora_"
    save_file(
        {f"{name}A.weight": torch.zeros(2, 99), f"{name}B.weight": torch.zeros(128, 2)},
        adapter / "adapter_model.safetensors",
    )
    with pytest.raises(ModelLoadError, match="another model"):
        lora.open_store(folder)
