"""Tokenising in the gateway, exactly as the engine's model was trained: the engine hands out its tokenizer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from sixfold_runtime.engine.protocol import TokenizerBundle
from sixfold_runtime.gateway.errors import bad_request
from sixfold_runtime.gateway.words import Word, words

PROBE_CHARACTERS = 16
"""Characters a token of the context; text of people has 2 to 6."""
INLINE_CHARACTERS = 8192
"""Up to here, tokenising takes about a millisecond and stays on the event loop; above, a thread does it."""


class _GenerationTag(Extension):
    """Hugging Face's `{% generation %}` marks the assistant's tokens for training; for serving it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def compile_template(source: str) -> jinja2.Template:
    """A chat template in the sandbox and with the helpers that Hugging Face's templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


class ModelTokenizer:
    """The tokenizer and chat template of one model."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        """Parses; takes up to a second for a large vocabulary. Raises ValueError on a bundle that is damaged."""
        try:
            self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
            self._template = compile_template(bundle.chat_template) if bundle.chat_template else None
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ValueError(f"the tokenizer can't be used: {error}") from error
        # Too long is an error that the client sees, never a text that was cut.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = bundle.special_tokens
        self.vocabulary_tokens = bundle.vocabulary_tokens or self._tokenizer.get_vocab_size()

    @classmethod
    def from_json(cls, body: bytes) -> ModelTokenizer:
        """From the body of GET /tokenizer/<sha256>; raises ValueError."""
        return cls(msgspec.json.decode(body, type=TokenizerBundle))

    async def encode(self, text: str, context_tokens: int, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's own start and end tokens unless told otherwise.

        Of a text that is far over `context_tokens` only the start is tokenised: more than enough to refuse it.
        """
        # Without the places of tokens in the text, which few need.
        return (await self._encode(text, context_tokens, special_tokens, self._tokenizer.encode_batch_fast)).ids

    async def encode_words(self, text: str, context_tokens: int) -> tuple[list[int], list[Word]]:
        """As `encode`, and where the words are."""
        encoding = await self._encode(text, context_tokens, True, self._tokenizer.encode_batch)
        return encoding.ids, words(text, encoding)

    async def _encode(
        self, text: str, context_tokens: int, special_tokens: bool, encode_batch: Callable[..., list[Encoding]]
    ) -> Encoding:
        probe = context_tokens * PROBE_CHARACTERS
        if len(text) > probe:
            encoding = await self._encode_all(text[:probe], special_tokens, encode_batch)
            if len(encoding.ids) > 2 * context_tokens:
                return encoding
        return await self._encode_all(text, special_tokens, encode_batch)

    async def _encode_all(
        self, text: str, special_tokens: bool, encode_batch: Callable[..., list[Encoding]]
    ) -> Encoding:
        def encode() -> Encoding:
            # The call for one text holds the GIL, those for batches release it.
            return encode_batch([text], add_special_tokens=special_tokens)[0]

        return encode() if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode_chat(self, messages: list[dict[str, str]], context_tokens: int) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks.

        As in transformers, a template writes all special tokens itself, so the tokenizer adds none: a template
        that starts with bos_token doesn't get a second one.
        """
        return await self.encode(self.render(messages), context_tokens, special_tokens=False)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as text. Raises ApiError (400) where the template refuses it."""
        if self._template is None:
            raise bad_request(
                "this model has no chat template; use /v1/completions", "messages", code="no_chat_template"
            )
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from None
