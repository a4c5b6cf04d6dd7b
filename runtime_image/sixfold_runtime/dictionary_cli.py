"""`sixfold dictionary train`: a zstd dictionary for streamed answers (`spec.streaming.dictionaryConfigMapRef`).

Most of an answer's bytes are its JSON, alike in every event, and a dictionary saves sending them the first time. So
short answers gain, long ones hardly do, and the words themselves little: a token is shorter than what zstd looks for.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from sixfold_api.names import STREAM_DICTIONARY_FILE

DEFAULT_BYTES = 4096
MIN_ANSWERS = 16
SHORT_TOKENS = 20
_MAX_ANSWERS = 10_000
_HELD_OUT = 8
"""One answer in so many is kept to measure with."""
_TOKEN = re.compile(r"\s?[A-Za-z0-9_]{1,8}|\s?\w{1,2}|\s?[^\w\s]|\s+")
"""About what a model's tokens are: dictionaries don't depend on one tokenizer."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Dictionaries for streamed answers.")


class DictionaryError(Exception):
    """Why no dictionary could be made, for the person who asked for it."""


@app.callback()
def _group() -> None:
    """Keeps `train` a command of its own."""


@app.command()
def train(
    texts: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Answers like yours. JSON lines: `text`, or a chat's `messages`; other files: one answer a paragraph.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="The file to write.")],
    size: Annotated[int, typer.Option(min=512, max=2**20, help="Its most bytes.")] = DEFAULT_BYTES,
    model: Annotated[str, typer.Option(help="The name that answers carry: the variant's.")] = "chat",
) -> None:
    """Train one on your own text, and say what it saves on text that it wasn't trained on."""
    console = Console(stderr=True, soft_wrap=True)
    try:
        answers = [answer for path in texts for answer in read_answers(path)][:_MAX_ANSWERS]
        held_out = answers[::_HELD_OUT]
        data = trained([answer for at, answer in enumerate(answers) if at % _HELD_OUT], size, model)
    except DictionaryError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from error
    output.write_bytes(data)
    without, with_it = (sent_bytes(held_out, model, dictionary) for dictionary in (None, data))
    console.print(
        f"{output}: {len(data)} bytes from {len(answers)} answers. The first {SHORT_TOKENS} tokens of an answer:"
        f" {with_it} bytes instead of {without}."
        f"\nkubectl create configmap NAME --from-file={STREAM_DICTIONARY_FILE}={output}",
        highlight=False,
    )


def read_answers(path: Path) -> Iterator[str]:
    """The answers in a file: a chat's assistant messages, texts, or paragraphs. Raises DictionaryError."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DictionaryError(f"can't read {path} as UTF-8 text: {error}") from error
    if path.suffix not in (".jsonl", ".ndjson"):
        yield from (paragraph.strip() for paragraph in re.split(r"\n\s*\n", content) if paragraph.strip())
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                yield from _of_row(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise DictionaryError(f"{path}, line {number}: expected `text` or a chat's `messages`") from error


def _of_row(row: dict[str, Any]) -> Iterator[str]:
    if "messages" not in row:
        texts = [row["text"]]
    else:
        texts = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    yield from (text.strip() for text in texts if text.strip())


def trained(answers: Sequence[str], size_bytes: int, model: str) -> bytes:
    """A dictionary in zstd's format. Raises DictionaryError where there is too little text for one."""
    import zstandard

    if len(answers) < MIN_ANSWERS:
        raise DictionaryError(f"{len(answers)} answers are too few to learn from: give at least {MIN_ANSWERS + 3}")
    try:
        return zstandard.train_dictionary(
            size_bytes, [b"".join(events(answer, model, seed)) for seed, answer in enumerate(answers)]
        ).as_bytes()
    except zstandard.ZstdError as error:
        raise DictionaryError(f"zstd can't learn from these answers ({error}): give more, or longer ones") from error


def events(answer: str, model: str, seed: int, most_tokens: int | None = None) -> Iterator[bytes]:
    """An answer as the gateway streams it, without its last events."""
    from sixfold_runtime.gateway.replies import ChatForm
    from sixfold_runtime.gateway.sse import event

    drawn, form = random.Random(seed), ChatForm()
    frame = {
        "id": f"{form.prefix}{drawn.getrandbits(96):024x}",
        "object": form.part,
        "created": 1_700_000_000 + drawn.randrange(10**8),
        "model": model,
    }
    yield event(frame | {"choices": [form.opening(0)]})
    for token in _TOKEN.findall(answer)[:most_tokens]:
        yield event(frame | {"choices": [form.delta(0, token, ())]})


def sent_bytes(answers: Sequence[str], model: str, dictionary: bytes | None) -> int:
    """Mean bytes of the first tokens of an answer, as zstd and token by token."""
    from sixfold_runtime.gateway.dictionary import Dictionary
    from sixfold_runtime.gateway.stream_encoding import Encoding
    from sixfold_runtime.modes.streaming import Form

    used = None if dictionary is None else Dictionary(dictionary)
    form = Form.ZSTD if used is None else Form.DCZ
    total = 0
    for seed, answer in enumerate(answers, len(answers)):
        encoder = Encoding(form, dictionary=used, uses_dictionary=used is not None).encoder()
        total += sum(len(encoder.encode(sent, False)) for sent in events(answer, model, seed, SHORT_TOKENS))
    return round(total / len(answers))
