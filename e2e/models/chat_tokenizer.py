"""The chat models' tokenizer: byte-level BPE with 1,024 tokens, and the chat template in speaker-tag form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_TOKENS = 1024
CONTEXT_TOKENS = 4096
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
TURN_STOP = "\n\n"

# Blank lines inside a message would end its turn, so they are dropped.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set lines = message['content'].split('\\n') | map('trim') | select | join('\\n') -%}
{{- message['role'] | upper + ':\\n' + lines + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'ASSISTANT:\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE over ``texts``; every text gets the begin token in front when special tokens are asked for.

    The two newlines of a turn's end always stay two tokens: none of the texts that it learns from ends in them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.strip() for text in texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, token_id(tokenizer, BEGIN))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that the vocabulary must have. Raises ValueError when it doesn't."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}: it is not one of the example pair's")
    return found


def special_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids under the names that config.json and generation_config.json use."""
    names = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    return {name: token_id(tokenizer, token) for name, token in names.items()}
