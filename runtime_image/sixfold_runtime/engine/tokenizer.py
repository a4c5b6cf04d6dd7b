"""The tokenizer of a model folder: the bundle that gateways fetch, and its digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.protocol import TokenizerBundle

_SPECIAL = ("bos_token", "cls_token", "eos_token", "mask_token", "pad_token", "sep_token", "unk_token")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer and the bytes that a gateway needs to tokenise alike."""

    tokenizer: Tokenizer
    bundle: bytes
    """TokenizerBundle as JSON: the body of GET /tokenizer/<sha256>."""
    sha256: str
    """Hex digest of `bundle`."""
    max_token_id: int
    model_max_tokens: int | None
    """`model_max_length` of tokenizer_config.json, where it is a real limit."""


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object of the model folder; {} where an optional file is missing.

    Raises:
        ModelLoadError: the file is required and missing, or isn't a JSON object.
    """
    if not path.is_file():
        if required:
            raise ModelLoadError(f"{path} is missing: is {path.parent} the folder of a model?")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return content


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Read tokenizer.json, the special tokens and the chat template of a model folder.

    Raises:
        ModelLoadError: tokenizer.json is missing or broken.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"{path} is missing: convert the tokenizer to the fast format (tokenizer.json) first")
    text = path.read_text(encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelLoadError(f"{path} can't be read as a tokenizer: {error}") from error
    tokenizer.no_padding()  # padding and truncation are the engine's to decide
    tokenizer.no_truncation()
    config = read_json(folder / "tokenizer_config.json")
    bundle = msgspec.json.encode(
        TokenizerBundle(
            tokenizer_json=text,
            chat_template=_chat_template(folder, config),
            special_tokens=_special_tokens({**read_json(folder / "special_tokens_map.json"), **config}),
            vocabulary_tokens=tokenizer.get_vocab_size(with_added_tokens=True),
        )
    )
    limit = config.get("model_max_length")
    return LoadedTokenizer(
        tokenizer=tokenizer,
        bundle=bundle,
        sha256=hashlib.sha256(bundle).hexdigest(),
        max_token_id=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1),
        # transformers writes 1e30 where there is no limit.
        model_max_tokens=int(limit) if isinstance(limit, int | float) and 0 < limit < 1e9 else None,
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str:
    """chat_template.jinja, else the template in tokenizer_config.json (of several, the default one), else ""."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default", "")
    return str(template)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like by name; a token may be written as a string or as an object with its content."""
    tokens = {name: config[name] for name in _SPECIAL if config.get(name)}
    return {name: token["content"] if isinstance(token, dict) else str(token) for name, token in tokens.items()}
