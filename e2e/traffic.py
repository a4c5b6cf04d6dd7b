"""Clients that keep asking while something changes, and remember how each request ended."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PROMPTS = (
    "What news from the court?",
    "Who goes there in the night?",
    "Tell me of thy master and his daughter.",
    "Shall we to the wars?",
)


@dataclass(frozen=True)
class Outcome:
    """How one streamed chat ended. `error` is empty exactly if the stream was complete."""

    started: float
    seconds: float
    level: str = ""
    encoding: str = "identity"
    text: str = ""
    error: str = ""


@dataclass
class Traffic:
    """Streams chats with `clients` connections until it is stopped: `async with Traffic(...) as traffic`."""

    base_url: str
    key: str
    model: str
    clients: int = 8
    max_tokens: int = 64
    outcomes: list[Outcome] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Traffic:
        self._tasks = [asyncio.create_task(self._client(index)) for index in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error]

    async def _client(self, index: int) -> None:
        # As every client of OpenAI's: what never reached a server is sent again.
        transport = httpx.AsyncHTTPTransport(retries=5)
        timeout = httpx.Timeout(60, connect=1)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=timeout, transport=transport) as http:
            turn = index
            while not self._stopping:
                self.outcomes.append(
                    await stream_chat(http, self.key, self.model, PROMPTS[turn % len(PROMPTS)], self.max_tokens)
                )
                turn += 1


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer as they come, without its `[DONE]`."""
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


async def stream_chat(http: httpx.AsyncClient, key: str, model: str, prompt: str, max_tokens: int) -> Outcome:
    """One streamed chat, read to its `[DONE]`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": max_tokens,
        "temperature": 0.8,
    }
    started = time.monotonic()
    level, encoding, text, finish, done = "", "identity", "", None, False
    try:
        async with http.stream(
            "POST", "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            level = answer.headers.get("x-sixfold-level", "")
            encoding = answer.headers.get("content-encoding", "identity")
            if answer.status_code != 200:
                error = f"HTTP {answer.status_code}: {(await answer.aread()).decode()[:300]}"
                return Outcome(started, time.monotonic() - started, level, encoding, error=error)
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return Outcome(started, time.monotonic() - started, level, encoding, text, str(event))
                    text += event["choices"][0]["delta"].get("content") or ""
                    finish = event["choices"][0]["finish_reason"] or finish
    except httpx.HTTPError as problem:
        return Outcome(started, time.monotonic() - started, level, encoding, text, repr(problem))
    complete = done and finish in ("stop", "length")
    error = "" if complete else f"the stream ended early: finish_reason {finish}, [DONE] {done}"
    return Outcome(started, time.monotonic() - started, level, encoding, text, error)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
