"""LoRA adapters (Hu et al., arXiv 2106.09685) in PEFT's format, in the folder `adapter` of a model folder.

On full-precision weights an adapter is merged at load: W + scale * B A. On quantised weights it stays beside them,
y = q(x) + scale * B (A x), and only an adapter that was retrained for these weights is taken: one that learnt to
correct the full-precision weights knows nothing of what quantising changed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.linear import Linear
from sixfold_runtime.engine.tokenizer import read_json

ADAPTER_FOLDER = "adapter"
"""In a model folder."""
RETRAINED_FILE = "sixfold_lora.json"
"""In an adapter's folder: {"base_digest": ..., "scheme": ...}, of the quantised weights that it was retrained for."""
_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight$")
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases in B",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "modules_to_save": "whole modules beside the low-rank ones (modules_to_save)",
    "trainable_token_indices": "new embeddings (trainable_token_indices)",
    "target_parameters": "parameters that are no linears (target_parameters)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "arrow_config": "a router (Arrow)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
"""Settings of adapter_config.json that change what an adapter computes."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights that also change the weights below the adapter."""


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one linear: scale * b @ a."""

    a: torch.Tensor
    """float32 [rank, in]"""
    b: torch.Tensor
    """float32 [out, rank]"""
    scale: float

    def dense(self) -> torch.Tensor:
        """float32 [out, in]"""
        return self.scale * (self.b @ self.a)


class AdaptedStore(TensorStore):
    """Tensors of a model folder that has an adapter: plain weights come with their update merged."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelLoadError: the weights or the adapter can't be used."""
        super().__init__(folder)
        self.updates = read_adapter(folder / ADAPTER_FOLDER)
        for module, update in self.updates.items():
            _require_fit(self, module, update)
        quantised = [module for module in self.updates if not self.has(f"{module}.weight") or self._is_int8(module)]
        if quantised:
            require_retrained(folder / ADAPTER_FOLDER, self, quantised[0])

    def get(self, name: str) -> torch.Tensor:
        tensor = super().get(name)
        module = name.removesuffix(".weight")
        if module == name or module not in self.updates or self._is_int8(module):
            return tensor
        return (tensor.float() + self.updates[module].dense()).to(tensor.dtype)

    def _is_int8(self, module: str) -> bool:
        return self.has(f"{module}.weight_scale")


def open_store(folder: Path) -> TensorStore:
    """The weights of a model folder, with its adapter where it has one.

    Raises:
        ModelLoadError: the weights or the adapter can't be used.
    """
    return AdaptedStore(folder) if (folder / ADAPTER_FOLDER).is_dir() else TensorStore(folder)


def beside(
    linear: Linear,
    store: TensorStore,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    output_order: torch.Tensor | None = None,
) -> Linear:
    """The quantised `linear` of the named modules, with the updates that the store's adapter has for them.

    Args:
        output_order: int64 [out], in which `linear` has the modules' outputs.
    """
    if not isinstance(store, AdaptedStore) or not any(name in store.updates for name in names):
        return linear
    outputs = [_shape(store, name)[0] for name in names]
    return AdaptedLinear(linear, [store.updates.get(name) for name in names], outputs, dtype, device, output_order)


class AdaptedLinear(Linear):
    """A linear (quantised, or shared with others) and, in the compute type, the low-rank updates of its modules.

    Attributes:
        own_bytes: resident bytes of the updates.
    """

    def __init__(
        self,
        inner: Linear,
        updates: Sequence[Update | None],
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        output_order: torch.Tensor | None,
    ) -> None:
        """`updates` and `outputs` (their count) are of the modules side by side in `inner`, before `output_order`."""
        self._inner = inner
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.kernel = f"{inner.kernel}+lora"
        a = torch.cat([update.a for update in updates if update is not None])
        # One product for all modules: B is block-diagonal.
        b = torch.zeros(len(a), sum(outputs))
        rank, output = 0, 0
        for update, count in zip(updates, outputs, strict=True):
            if update is not None:
                b[rank : rank + len(update.a), output : output + count] = update.scale * update.b.t()
                rank += len(update.a)
            output += count
        self._a = a.t().contiguous().to(device, dtype)
        self._b = (b if output_order is None else b[:, output_order]).to(device, dtype)
        self.own_bytes = self._a.nbytes + self._b.nbytes
        self.weight_bytes = inner.weight_bytes + self.own_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(x).addmm_(x @ self._a, self._b)


def read_adapter(folder: Path) -> dict[str, Update]:
    """The updates of a PEFT adapter by module name.

    Raises:
        ModelLoadError: a file is missing or damaged, or the adapter uses what isn't supported; with the reason.
    """
    config = read_json(folder / "adapter_config.json", required=True)
    require_supported(config, folder)
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: pickled adapters are never loaded, save it as safetensors")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}): fetch it again") from error
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _TENSOR.match(name)) is None:
            raise ModelLoadError(f"{path}: {name} is no low-rank factor of a linear, which is all that is supported")
        sides.setdefault(match["module"], {})[match["side"]] = tensor.float()
    for module, pair in sides.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            raise ModelLoadError(f"{path}: lora_A and lora_B of {module} don't belong together")
    return {
        module: Update(pair["A"], pair["B"], _scale(config, module, pair["A"].shape[0]))
        for module, pair in sorted(sides.items())
    }


def require_supported(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse what `read_adapter` would get wrong.

    Raises:
        ModelLoadError: with the setting and what is supported.
    """
    problems = [what for key, what in _REFUSED.items() if config.get(key)]
    if (kind := str(config.get("peft_type"))) != "LORA":
        problems.append(f"peft_type {kind}")
    if (bias := config.get("bias", "none")) != "none":
        problems.append(f"trained biases (bias: {bias})")
    if str(config.get("init_lora_weights")).startswith(_CHANGES_BASE):
        problems.append(f"base weights changed by init_lora_weights: {config['init_lora_weights']}")
    if problems:
        raise ModelLoadError(f"{folder}: the adapter uses {', '.join(problems)}; plain LoRA and rsLoRA are supported")


def require_retrained(folder: Path, base: TensorStore, module: str) -> None:
    """Refuse an adapter that wasn't retrained on these quantised weights, of which `module` is one.

    Raises:
        ModelLoadError: it wasn't; says how to do it.
    """
    retrained = read_json(folder / RETRAINED_FILE)
    if retrained.get("base_digest") == base_digest(base):
        return
    trained_on = "other quantised weights" if retrained else "full precision"
    raise ModelLoadError(
        f"{folder}: the adapter was trained on {trained_on}, and {module} is quantised: retrain it with "
        "`sixfold prepare lora` (or let the variant's preparation do so), or serve the full-precision weights"
    )


def base_digest(store: TensorStore) -> str:
    """Tells quantised weights apart by their scales, which are few: "sha256:..." over names, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(store.names):
        if name.endswith((".scales", ".weight_scale")):
            scales = store.get(name).float().contiguous()
            digest.update(f"{name} {tuple(scales.shape)}\n".encode())
            digest.update(scales.numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Like PEFT: alpha_pattern names modules by the end of their name; rsLoRA divides by the root of the rank."""
    alpha = float(config.get("lora_alpha", 8))
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = float(value)
            break
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _shape(store: TensorStore, module: str) -> tuple[int, int]:
    """(outputs, inputs)"""
    if store.has(f"{module}.qweight"):
        return store.shape(f"{module}.scales")[1], store.shape(f"{module}.g_idx")[0]
    outputs, inputs = store.shape(f"{module}.weight")
    return outputs, inputs


def _require_fit(store: TensorStore, module: str, update: Update) -> None:
    if not (store.has(f"{module}.qweight") or store.has(f"{module}.weight")):
        raise ModelLoadError(f"{store.folder}: the adapter is for {module}, which the model doesn't have")
    wanted, got = _shape(store, module), (update.b.shape[0], update.a.shape[1])
    if wanted != got:
        raise ModelLoadError(
            f"{store.folder}: the adapter's update of {module} is {list(got)}, the weight {list(wanted)}: "
            "it was trained on another model"
        )
