"""Tiny models with random weights, made with transformers; real files, real loading."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task

torch.set_num_threads(1)

CORPUS = [
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.",
    "你好世界。今天天气很好。 😀🎉🚀 naïve café, straße, Ωmega",
    "The quick brown fox jumps over the lazy dog. 0123456789\n\nUser: hello\nAssistant: hi\n",
]


def make_tokenizer(folder: Path, vocabulary: int = 320) -> Tokenizer:
    """A byte-level BPE so small that most CJK characters and emoji span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"})
    )
    return tokenizer


def make_llama(folder: Path, **changes: Any) -> Path:
    """A two-layer Llama with grouped heads; weights are large enough to make greedy output varied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    model.generation_config.stop_strings = ["\n\n"]
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_bert(folder: Path) -> Path:
    """A two-layer BERT with three labels."""
    from transformers import BertConfig, BertForSequenceClassification

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(8)
    config = BertConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label={0: "bad", 1: "so-so", 2: "good"},
        label2id={"bad": 0, "so-so": 1, "good": 2},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(name="chat", task=Task.GENERATION, path=str(make_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(make_bert(tmp_path_factory.mktemp("bert"))))
