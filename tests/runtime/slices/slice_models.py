"""Tiny random models of each architecture, and checkpoints that were "tuned" from them: real files, the real engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sixfold_api.scalars import Task
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.prepare.slice_trunk import SliceTrunk

CPU = torch.device("cpu")
LAYERS, WIDTH, FFN, WORDS, CONTEXT = 3, 32, 48, 120, 40
LABELS = {0: "billing", 1: "technical", 2: "other"}
_SIZES = {
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False, "pad_token_id": 0}
_SETTINGS: dict[str, dict[str, Any]] = {
    "Bert": _SIZES,
    "Roberta": {**_SIZES, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1},
    "DistilBert": {
        "vocab_size": 128, "dim": WIDTH, "hidden_dim": FFN, "n_layers": LAYERS, "n_heads": 4,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.3,
    },
    "Llama": _DECODER,
    "Qwen2": _DECODER,
    "Qwen3": {**_DECODER, "head_dim": 8},
}  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Words w3, w4, ...; a text is closed by </s>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{index}": index for index in range(3, WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))


def save_model(folder: Path, kind: str, suffix: str, seed: int = 0, **changes: Any) -> Path:
    """`kind` is such as Bert, `suffix` such as ForSequenceClassification or Model."""
    import transformers

    torch.manual_seed(seed)
    labels = {"id2label": LABELS, "label2id": {label: index for index, label in LABELS.items()}}
    config = getattr(transformers, f"{kind}Config")(**{**_SETTINGS[kind], **labels, **changes})
    getattr(transformers, f"{kind}{suffix}")(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def retuned(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a model with changed tensors."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("slices"))
    tensors = load_file(source / "model.safetensors")
    changed = {name: change(name, tensor).contiguous() for name, tensor in tensors.items()}
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def is_ffn(name: str) -> bool:
    return any(part in name for part in (".intermediate.dense.", ".ffn.lin", ".mlp.")) or (
        ".output.dense." in name and ".attention." not in name
    )


def is_head(name: str) -> bool:
    return any(part in name for part in ("classifier.", "pooler.", "score."))


def noise(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


class Adapters:
    """Tensors of a slice with random adapters."""

    def __init__(self, layers: range, bottleneck: int = 4, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.tensors = {
            f"adapters.{layer}.{name}": torch.randn(*shape, generator=random)
            for layer in layers
            for name, shape in {
                "down.weight": (bottleneck, WIDTH), "down.bias": (bottleneck,),
                "up.weight": (WIDTH, bottleneck), "up.bias": (WIDTH,),
            }.items()
        }  # fmt: skip


def add_slice(trunk: SliceTrunk, name: str, tensors: Mapping[str, torch.Tensor], **given: Any) -> Path:
    """Write a slice for `trunk`, and tell where."""
    settings = {"task": Task.GENERATION, "labels": (), "fingerprint": trunk.fingerprint, **given}
    path = slice_path(trunk.folder, name)
    write_slice(path, tensors, **settings)
    return path
