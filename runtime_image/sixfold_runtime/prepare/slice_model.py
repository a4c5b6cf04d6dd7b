"""A frozen trunk with bottleneck adapters and a head, differentiable: what a task slice is trained with.

The trunk is transformers' module. Adapters are put on by hooks at the last linear of a feed-forward part, in place of
its output z: z + up(gelu(down(z))) (Houlsby et al., arXiv 1902.00751). `up` begins at zero, so that training starts
from the trunk as it is. No gradient is kept below the first adapted layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from sixfold_api.scalars import Task
from sixfold_api.subgraphs import AdapterShape
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.quantized_module import plain_state
from sixfold_runtime.engine.slice_file import HEAD_BIAS, HEAD_WEIGHT, adapter_names
from sixfold_runtime.prepare.files import read_config
from sixfold_runtime.prepare.saturation import dequantised
from sixfold_runtime.prepare.slice_data import IGNORED, LabelledText

_HEAD_SPREAD = 0.02


class AdaptedModel:
    """Attributes:
    parameters: what is trained, by the names that a slice's file has for them, float32.
    """

    def __init__(
        self,
        folder: Path,
        task: Task,
        labels: int,
        ffn_outputs: Mapping[int, str],
        bottleneck: int,
        seed: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            ffn_outputs: layer from 0 -> the checkpoint's module at the end of its feed-forward part, of those layers
                that get an adapter.
        """
        self._task, self._device = task, device
        self._module = frozen_module(folder, task).to(device)
        config = self._module.config.get_text_config()
        self._pad_id: int = getattr(config, "pad_token_id", None) or 0
        self._is_decoder = hasattr(self._module, "embed_tokens")
        width: int = config.hidden_size
        self.parameters: dict[str, torch.Tensor] = {}
        random = torch.Generator().manual_seed(seed)
        for layer, name in ffn_outputs.items():
            self._add_adapter(layer, name, width, bottleneck, random)
        if task is not Task.GENERATION:
            inputs = width if task is Task.TOKEN_CLASSIFICATION else 2 * width
            self._parameter(HEAD_WEIGHT, torch.randn(labels, inputs, generator=random) * _HEAD_SPREAD)
            self._parameter(HEAD_BIAS, torch.zeros(labels))

    def loss(self, batch: Sequence[LabelledText]) -> torch.Tensor:
        """Mean over the texts, the labelled tokens, or the tokens to come; a scalar with gradients."""
        longest = max(len(text.ids) for text in batch)
        ids = self._tensor([[*text.ids, *[self._pad_id] * (longest - len(text.ids))] for text in batch])
        lengths = self._tensor([len(text.ids) for text in batch])
        mask = torch.arange(longest, device=self._device) < lengths[:, None]
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if self._task is Task.GENERATION:
            logits = self._module(**inputs, use_cache=False).logits[:, :-1]
            following = ids[:, 1:].masked_fill(~mask[:, 1:], IGNORED)
            return functional.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED)
        hidden = self._module(**inputs).last_hidden_state
        if self._task is Task.TOKEN_CLASSIFICATION:
            wanted = self._tensor([label for text in batch for label in text.labels])
            losses = functional.cross_entropy(self._logits(hidden[mask]), wanted, ignore_index=IGNORED, reduction="sum")
            return losses / (wanted != IGNORED).sum().clamp(min=1)
        features = self._features(hidden, mask, lengths)
        return functional.cross_entropy(self._logits(features), self._tensor([text.labels[0] for text in batch]))

    def _features(self, hidden: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """As Trunk.features: [texts, 2 * width]"""
        place = lengths - 1 if self._is_decoder else torch.zeros_like(lengths)
        one = hidden[torch.arange(len(hidden), device=self._device), place]
        mean = (hidden * mask[..., None]).sum(1) / lengths[:, None]
        return torch.cat([one, mean], dim=-1)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.parameters[HEAD_WEIGHT], self.parameters[HEAD_BIAS])

    def _add_adapter(self, layer: int, name: str, width: int, bottleneck: int, random: torch.Generator) -> None:
        down_weight, down_bias, up_weight, up_bias = adapter_names(layer)
        down = (
            self._parameter(down_weight, torch.randn(bottleneck, width, generator=random) * width**-0.5),
            self._parameter(down_bias, torch.zeros(bottleneck)),
        )
        up = (
            self._parameter(up_weight, torch.zeros(width, bottleneck)),
            self._parameter(up_bias, torch.zeros(width)),
        )

        def adapt(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output + functional.linear(functional.gelu(functional.linear(output, *down)), *up)

        _submodule(self._module, name).register_forward_hook(adapt)

    def _parameter(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.parameters[name] = value.to(self._device).requires_grad_()
        return self.parameters[name]

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, device=self._device)


def adapted_layers(layers: int, shape: AdapterShape) -> range:
    """The layers that get an adapter, from 0: the last ones."""
    return range(max(0, layers - shape.layers), layers)


def frozen_module(folder: Path, task: Task) -> Any:
    """transformers' module in eval mode, float32: a causal language model, or a classifier's trunk without its head.

    Quantised weights are there with their full-precision values, so that they can be differentiated through.
    """
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    auto = transformers.AutoModelForCausalLM if task is Task.GENERATION else transformers.AutoModel
    given: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if read_config(folder).get("quantization_config"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        del config.quantization_config
        state = plain_state(TensorStore(folder), torch.float32)
        state |= {f"{name}.weight": weight for name, weight in dequantised(folder)}
        auto = auto._model_mapping[type(config)]
        given = {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}
    module = auto.from_pretrained(
        **given, dtype=torch.float32, local_files_only=True, trust_remote_code=False, attn_implementation="sdpa"
    )
    return module.eval().requires_grad_(False)


def _submodule(module: Any, name: str) -> Any:
    """By its name in the checkpoint, which may stand below the name of the whole model (`bert.`, `model.`)."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return module.get_submodule(name.partition(".")[2])
