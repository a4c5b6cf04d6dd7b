"""What the tokenizer of a model is, and whether it fits the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, read_json

_ENDLESS = 10**9
"""transformers writes 1e30 for a tokenizer without a limit."""


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer that was read.

    Attributes:
        ids: every token id that it can give.
        fingerprint: SHA-256 over everything that decides about token ids (not over padding and truncation).
        limit_tokens: longest sequence that its author allows, if said.
    """

    ids: frozenset[int]
    fingerprint: str
    limit_tokens: int | None


def read_tokenizer(folder: Path) -> TokenizerFacts:
    """Read tokenizer.json. Raises PreparationError(TokenizerMismatch) if that is impossible."""
    content = read_json(folder / TOKENIZER, Reason.TOKENIZER_MISMATCH)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:
        raise PreparationError(Reason.TOKENIZER_MISMATCH, f"{TOKENIZER} is no tokenizer: {error}") from error
    ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
    if not ids:
        raise PreparationError(Reason.TOKENIZER_MISMATCH, f"{TOKENIZER} has no tokens")
    return TokenizerFacts(ids, _fingerprint(content), _limit_tokens(folder))


def require_fit(tokenizer: TokenizerFacts, folder: Path, embedding_rows: int, config: Any) -> None:
    """Compare the tokenizer with the model in the same folder.

    Raises PreparationError(TokenizerMismatch) if one has token ids that the other doesn't know.
    """
    if max(tokenizer.ids) >= embedding_rows:
        raise PreparationError(
            Reason.TOKENIZER_MISMATCH,
            f"{TOKENIZER} goes up to token id {max(tokenizer.ids)}, the model's embedding has {embedding_rows} rows: "
            "it belongs to another model",
        )
    for file, name, token in _special_ids(folder, config):
        if token not in tokenizer.ids:
            raise PreparationError(
                Reason.TOKENIZER_MISMATCH,
                f"{file} says {name} {token}, and {TOKENIZER} has no such token: it belongs to another model",
            )


def _special_ids(folder: Path, config: Any) -> Iterator[tuple[str, str, int]]:
    """(file, field, token id) of the tokens that begin, end and pad a sequence."""
    path = folder / GENERATION_CONFIG
    generation = read_json(path) if path.is_file() else {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for file, value in ((CONFIG, getattr(config, name, None)), (GENERATION_CONFIG, generation.get(name))):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, int) and item >= 0:
                    yield file, name, item


def _fingerprint(content: dict[str, Any]) -> str:
    deciding = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    canonical = json.dumps(deciding, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"sha256:{hashlib.sha256(canonical.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _limit_tokens(folder: Path) -> int | None:
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return None
    limit = read_json(path, Reason.TOKENIZER_MISMATCH).get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _ENDLESS else None
