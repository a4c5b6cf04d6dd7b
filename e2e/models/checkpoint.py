"""Writes and reads a model folder as Hugging Face tools know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from chat_tokenizer import save_tokenizer, special_token_ids
from safetensors.torch import load_file, save_file
from tiny_llama import LAYER_WEIGHTS, Shape, TinyLlama, llama_config
from tokenizers import Tokenizer


def save_chat_model(model: TinyLlama, tokenizer: Tokenizer, folder: Path, stop_strings: tuple[str, ...]) -> None:
    """Config, bf16 weights, tokenizer, chat template and generation config. The same model gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    generation: dict[str, Any] = {**special_token_ids(tokenizer)}
    _write_json(folder / "config.json", llama_config(model.shape, special_token_ids(tokenizer)))
    if stop_strings:
        generation["stop_strings"] = list(stop_strings)
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder)
    save_file(model.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_chat_model(folder: Path) -> tuple[TinyLlama, Tokenizer]:
    """The model in float32 and its tokenizer, for training and measuring."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        context=config["max_position_embeddings"],
    )
    weights = load_file(folder / "model.safetensors")
    stacked = {
        name: torch.stack(
            [
                torch.cat([weights[f"model.layers.{layer}.{standard}.weight"] for standard in standards])
                for layer in range(shape.layers)
            ]
        )
        for name, standards in LAYER_WEIGHTS.items()
    }
    model = TinyLlama(shape, seed=0)
    model.load_state_dict(
        {**stacked, "embedding": weights["model.embed_tokens.weight"], "final_norm": weights["model.norm.weight"]}
    )
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
