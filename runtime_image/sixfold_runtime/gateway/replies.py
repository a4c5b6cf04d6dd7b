"""Answers in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sixfold_runtime.engine.protocol import TokenLogprob

LEAST_LOGPROB = -9999.0
"""OpenAI's word for a token that is very unlikely; JSON has no infinity."""


class Form(Protocol):
    """How an endpoint writes its choices. `logprobs` is empty where none were asked for."""

    prefix: str
    whole: str
    part: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first choice of a stream, before any text."""

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """What a step added. The text of a token may come later than its log-probability."""

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]: ...

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """A choice of an answer that isn't streamed."""


class ChatForm:
    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": _content(logprobs), "finish_reason": None}

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _content(logprobs), "finish_reason": finish_reason}


def _content(logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    entries = [_entry(token) | {"top_logprobs": [_entry(other) for other in token.top]} for token in logprobs]
    return {"content": entries, "refusal": None} if entries else None


def _entry(token: TokenLogprob) -> dict[str, Any]:
    text = token.token.decode(errors="replace")
    return {"token": text, "logprob": _finite(token.logprob), "bytes": list(token.token)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class CompletionForm:
    """Of one request: it counts the characters of each choice, for `text_offset`."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self) -> None:
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, logprobs), "finish_reason": None}

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        reported = self._logprobs(index, logprobs)
        return {"index": index, "text": text, "logprobs": reported, "finish_reason": finish_reason}

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's four lists, one entry a token; the token that was drawn is always among the alternatives."""
        if not logprobs:
            return None
        return {
            "tokens": [_name(token) for token in logprobs],
            "token_logprobs": [_finite(token.logprob) for token in logprobs],
            "top_logprobs": [
                {_name(other): _finite(other.logprob) for other in (*token.top, token)} for token in logprobs
            ],
            "text_offset": [self._offsets[index].of_next(token.token) for token in logprobs],
        }


class _Offsets:
    """Where each token of an answer begins, in characters; a character over several tokens counts at its end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def of_next(self, token: bytes) -> int:
        if token and token[0] & 0xC0 != 0x80:  # it begins a character, so one that was never completed ends here
            self._characters += len(self._decoder.decode(b"", final=True))
        offset = self._characters
        self._characters += len(self._decoder.decode(token))
        return offset


def _name(token: TokenLogprob) -> str:
    """The token as text; one that is no whole characters as OpenAI writes it, so that no two share a name."""
    try:
        return token.token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)


@dataclass
class Usage:
    """Tokens of a request, over all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            # OpenAI's names: what it predicts from the client's text, a draft model predicts here.
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }
