"""Classifiers with exit heads and task slices: random weights, real files."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import shutil
from pathlib import Path

import numpy as np
import pytest

from sixfold_api.scalars import Task

LABELS = {
    "own": ["bad", "so-so", "good"],
    "topic": ["sport", "music", "war", "food"],
    "pos": ["NOUN", "OTHER"],
}
LAYERS, WIDTH, DEPTHS = 4, 32, (1, 2, 3)
TOKENIZER = Path(__file__).parents[2] / "examples" / "models" / "chat" / "tokenizer.json"


def save_exits(folder: Path, fingerprint: str) -> None:
    import torch

    from sixfold_runtime.engine.exit_heads import ExitHeads, write_exit_heads
    from sixfold_runtime.modes.early_exit import Calibration

    dice, numbers, labels = torch.Generator().manual_seed(5), np.random.default_rng(5), LABELS["own"]
    calibration = Calibration(
        depths=DEPTHS,
        layers=LAYERS,
        confidences=numbers.uniform(1 / len(labels), 1, (200, len(DEPTHS))),
        agrees=np.ones((200, len(DEPTHS)), bool),
        lengths=numbers.integers(3, 60, 200),
        max_disagreement=0.03,
        length_relaxation=0.01,
    )
    heads = ExitHeads(
        tuple(labels),
        {depth: torch.randn(len(labels), 2 * WIDTH, generator=dice) * 0.2 for depth in DEPTHS},
        {depth: torch.zeros(len(labels)) for depth in DEPTHS},
        dict.fromkeys(DEPTHS, 1.0),
        calibration,
    )
    write_exit_heads(folder, heads, fingerprint)


def save_slices(folder: Path, fingerprint: str) -> None:
    import torch

    from sixfold_runtime.engine.slice_file import slice_path, write_slice

    dice = torch.Generator().manual_seed(6)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice) * 0.3

    topics, tags = LABELS["topic"], LABELS["pos"]
    topic = {"head.weight": random(len(topics), 2 * WIDTH), "head.bias": random(len(topics))}
    topic |= {"adapters.1.down.weight": random(8, WIDTH), "adapters.1.down.bias": random(8)}
    topic |= {"adapters.1.up.weight": random(WIDTH, 8), "adapters.1.up.bias": random(WIDTH)}
    write_slice(slice_path(folder, "topic"), topic, Task.CLASSIFICATION, topics, fingerprint)
    pos = {"head.weight": random(len(tags), WIDTH), "head.bias": random(len(tags))}
    write_slice(slice_path(folder, "pos"), pos, Task.TOKEN_CLASSIFICATION, tags, fingerprint)


@pytest.fixture(scope="session")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders: `intent` has a head of its own, exits, and slices `topic` and `pos`; `trunk` has only slices; `tagger`
    labels tokens."""
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel

    from sixfold_runtime.engine.checkpoint import TensorStore
    from sixfold_runtime.engine.fingerprint import trunk_fingerprint

    root = tmp_path_factory.mktemp("classifiers")
    torch.manual_seed(4)
    config = BertConfig(
        vocab_size=Tokenizer.from_file(str(TOKENIZER)).get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        id2label=dict(enumerate(LABELS["own"])),
        label2id={label: index for index, label in enumerate(LABELS["own"])},
    )
    BertForSequenceClassification(config).save_pretrained(root / "intent")
    BertModel(config, add_pooling_layer=False).save_pretrained(root / "trunk")
    BertForTokenClassification(config).save_pretrained(root / "tagger")
    shutil.copy(TOKENIZER, root / "tagger")
    for name in ("intent", "trunk"):
        shutil.copy(TOKENIZER, root / name)
        fingerprint = trunk_fingerprint(TensorStore(root / name))
        save_slices(root / name, fingerprint)
        if name == "intent":
            save_exits(root / name, fingerprint)
    return root
