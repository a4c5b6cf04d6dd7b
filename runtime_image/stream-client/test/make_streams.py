"""Writes streams.json beside this file: answers as the gateway encodes them, for the tests in JavaScript.

Run it with the project's Python when the gateway's encoding changes.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from sixfold_runtime.gateway.dictionary import Dictionary
from sixfold_runtime.gateway.stream_encoding import Encoding
from sixfold_runtime.modes.streaming import Form

WORDS = ["Der", "Käse", "是", "an", "old", "🧀", "friend;", "er", "reist", "mit", "龍", "and", "two", "words", "more."]


def answer(count: int) -> list[str]:
    """Events of an answer."""
    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "chat"}
    events = []
    for index in range(count):
        delta = {"content": f"{WORDS[index % len(WORDS)]}{index} "}
        chunk = frame | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        events.append(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n")
    usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": count + 3}
    return [*events, f"data: {json.dumps(frame | {'choices': [], 'usage': usage})}\n\n", "data: [DONE]\n\n"]


def stream(events: list[str], dictionary: Dictionary | None) -> dict[str, object]:
    encoding = Encoding(Form.SSE_ZSTD, 3, dictionary, dictionary is not None, True)
    encoder = encoding.encoder()
    sent = [encoder.encode(event.encode(), index == len(events) - 1) for index, event in enumerate(events)]
    return {"headers": encoding.headers, "events": events, "sent": [part.decode() for part in sent]}


def main() -> None:
    dictionary = Dictionary("".join(answer(5)).encode() * 2)
    streams = {
        "plain": stream(answer(40), None),
        "dictionary": stream(answer(3), dictionary) | {"bytes": base64.b64encode(dictionary.data).decode()},
    }
    target = Path(__file__).with_name("streams.json")
    target.write_text(json.dumps(streams, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
