"""Answers in OpenAI's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Form(Protocol):
    """How an endpoint writes its choices."""

    prefix: str
    whole: str
    part: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first choice of a stream, before any text."""

    def delta(self, index: int, text: str) -> dict[str, Any]: ...

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]: ...

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        """A choice of an answer that isn't streamed."""


class ChatForm:
    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


class CompletionForm:
    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


@dataclass
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
