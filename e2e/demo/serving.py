"""Level 3 in the gateway and the cache: a conversation that isn't computed twice, and streams that are small."""

from __future__ import annotations

import time
from typing import Any

import httpx
from rich.console import Console
from traffic import events_of

QUESTIONS = (
    "Good morrow, my lord. " + "I come with letters from the king, and with much news of the war. " * 24,
    "And who shall carry the answer to the court?",
    "What of the queen, and of her daughter?",
    "Then farewell, and may fortune keep thee.",
)


async def show_conversation(console: Console, http: httpx.AsyncClient, policy: str) -> None:
    """Four turns: of each, how much of the prompt was found, and how long the first token took."""
    await http.delete("/v1/kv-cache")  # an earlier demo asked the same
    messages: list[dict[str, str]] = []
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        body = {"model": policy, "messages": messages, "max_tokens": 48, "temperature": 0}
        answer, first_seconds, usage = await _streamed(http, body)
        messages.append({"role": "assistant", "content": answer})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        console.print(
            f"  turn {turn}: {usage['prompt_tokens']:4} tokens of prompt, {cached:4} of them found,"
            f" first token after {1000 * first_seconds:4.0f} ms"
        )


async def _streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """Text, seconds to the first of it, and usage."""
    text, first_seconds, usage, started = "", 0.0, {}, time.monotonic()
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = {"X-Conversation-Id": "demo"}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for event in events_of(answer):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first_seconds = first_seconds or time.monotonic() - started
                    text += piece
    return text, first_seconds, usage


async def show_streams(console: Console, http: httpx.AsyncClient, policy: str) -> None:
    """The same answer in every form that a client may ask for: the bytes that travel."""
    body = {
        "model": policy,
        "messages": [{"role": "user", "content": "What news from the court?"}],
        "max_tokens": 200,
        "temperature": 0.8,
        "seed": 3,
        "stream": True,
    }
    for form, headers in (
        ("plain", {"Accept-Encoding": "identity"}),
        ("gzip", {"Accept-Encoding": "gzip"}),
        ("zstd", {"Accept-Encoding": "zstd"}),
        ("sse-zstd", {"Accept-Encoding": "identity", "X-Stream-Compression": "sse-zstd"}),
    ):
        async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            sent = sum([len(part) async for part in answer.aiter_raw()])
        console.print(f"  {form:>8}: {sent:6} bytes")
