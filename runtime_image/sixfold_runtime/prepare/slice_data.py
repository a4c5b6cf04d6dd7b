"""Labelled text for task slices: JSON lines, by task

    Classification        {"text": "...", "label": "..."}                   (or a chat's `messages` instead of `text`)
    TokenClassification   {"tokens": ["word", ...], "labels": ["...", ...]}  a label or null a word
    Generation            {"text": "..."}                                   (or `messages`)

A text that is longer than the model's context is cut there, and counted.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from sixfold_api.scalars import Task
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.texts import MIN_EVALUATED, TextReader, windows

MIN_SAMPLES = 50
"""Fewer teach a task nothing that holds."""
IGNORED = -100
"""The label of tokens that have none (torch's)."""
WINDOW_TOKENS = 512
"""A generator learns from windows of at most so many tokens."""
_HELD_OUT_SHARE = 0.1
_MIN_HELD_OUT = 10
_MAX_LINE_BYTES = 10**7


@dataclass(frozen=True)
class LabelledText:
    """Token ids, and label indices: one of a text, one for each token (or IGNORED) of a token classification, none
    for a generator."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    line: int = 0
    """Of the file; a generator's long text is several windows."""


@dataclass(frozen=True)
class LabelledTexts:
    """What a file holds."""

    texts: tuple[LabelledText, ...]
    labels: tuple[str, ...]
    """By index."""
    cut: int
    """Texts that were longer than the context."""

    def counts(self) -> Counter[int]:
        """How often each label index stands there."""
        return Counter(label for text in self.texts for label in text.labels if label != IGNORED)


def read(
    path: Path,
    task: Task,
    reader: TextReader,
    context_tokens: int,
    *,
    labels: Sequence[str] = (),
    limit: int | None = None,
    is_evaluation: bool = False,
) -> LabelledTexts:
    """The first `limit` lines of a file (or all of them) as a task learns from them.

    Args:
        labels: in the order of the head; absent means all that occur, sorted.
        is_evaluation: it needs neither every label nor that many samples.

    Raises PreparationError(UnusableTraining): a line has no label or is no sample, a label is none of `labels` or
        never occurs, there is one label only, or fewer than 50 samples.
    """
    rows = _rows(path, limit)
    needed = MIN_EVALUATED if is_evaluation else MIN_SAMPLES
    if len(rows) < needed:
        raise _refused(path, f"it holds {len(rows)} samples, and {needed} are needed at least: add more")
    if task is Task.GENERATION:
        cut = []
        for number, row in rows:
            with _line(path, number):
                sample = reader.sample(number, row)
            cut += [LabelledText(ids, (), number) for ids in windows([sample], min(WINDOW_TOKENS, context_tokens))]
        return LabelledTexts(tuple(cut), (), 0)
    names: list[list[str | None]] = []
    for number, row in rows:
        with _line(path, number):
            names.append(_word_labels(row) if task is Task.TOKEN_CLASSIFICATION else [_text_label(row)])
    found = Counter(name for line in names for name in line if name is not None)
    known = {label: index for index, label in enumerate(labels or sorted(found))}
    _require_labels(path, found, known, is_evaluation)
    texts = []
    for (number, row), line in zip(rows, names, strict=True):
        with _line(path, number):
            labels_of_line = tuple(IGNORED if name is None else known[name] for name in line)
            texts.append(_encode(reader, task, number, row, labels_of_line))
    within = tuple(_within(text, task, context_tokens) for text in texts)
    return LabelledTexts(within, tuple(known), sum(len(text.ids) > context_tokens for text in texts))


def split(texts: LabelledTexts, seed: int) -> tuple[LabelledTexts, LabelledTexts]:
    """For training and held out, where no other file is held out: a tenth of the lines, drawn with `seed`."""
    lines = sorted({text.line for text in texts.texts})
    drawn = set(random.Random(seed).sample(lines, max(_MIN_HELD_OUT, int(len(lines) * _HELD_OUT_SHARE))))
    held_out, training = (
        tuple(text for text in texts.texts if (text.line in drawn) is is_held_out) for is_held_out in (True, False)
    )
    return LabelledTexts(training, texts.labels, texts.cut), LabelledTexts(held_out, texts.labels, 0)


def token_labels(words: Sequence[str], labels: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """The label of each token of the words with a space between each: a word's first token carries its label, all
    others are IGNORED.

    Args:
        offsets: of each token, characters of that text; (0, 0) of special tokens.
    """
    starts = list(accumulate((len(word) + 1 for word in words), initial=0))[:-1]
    ends = [start + len(word) for start, word in zip(starts, words, strict=True)]
    found = []
    labelled = -1
    for begin, end in offsets:
        word = bisect_right(ends, begin)  # a byte-level token may begin with the space before its word
        is_first = begin < end and word < len(words) and starts[word] < end and word > labelled
        found.append(labels[word] if is_first else IGNORED)
        labelled = word if is_first else labelled
    return found


def _rows(path: Path, limit: int | None) -> list[tuple[int, Any]]:
    """Line number and content of the lines that aren't empty."""
    rows: list[tuple[int, Any]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if len(rows) == limit:
                break
            if not line.strip():
                continue
            with _line(path, number):
                if len(line) > _MAX_LINE_BYTES:
                    raise ValueError(f"it has more than {_MAX_LINE_BYTES} bytes")
                rows.append((number, json.loads(line)))
    return rows


@contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"line {number}: {error}") from error


def _text_label(row: Any) -> str:
    if not isinstance(row, dict) or row.get("label") is None:
        raise ValueError("it has no label: add `label`")
    return _label(row["label"])


def _word_labels(row: Any) -> list[str | None]:
    words, labels = (row.get(key) if isinstance(row, dict) else None for key in ("tokens", "labels"))
    if not isinstance(words, list) or not isinstance(labels, list):
        raise ValueError("it needs `tokens`, a list of words, and `labels`, one for each word")
    if len(words) != len(labels):
        raise ValueError(f"it has {len(words)} tokens and {len(labels)} labels: give one label for each word")
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise ValueError("its tokens must be words, none of them empty")
    found = [None if label is None else _label(label) for label in labels]
    if not any(found):
        raise ValueError("none of its tokens has a label: add them, or leave the line out")
    return found


def _label(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"its label {value!r} is neither text nor a whole number")
    return str(value)


def _require_labels(path: Path, found: Mapping[str, int], known: Mapping[str, int], is_evaluation: bool) -> None:
    if odd := sorted(found.keys() - known.keys()):
        raise _refused(path, f"it has the label {odd[0]!r}, which is none of {', '.join(known)}")
    if is_evaluation:
        return
    if missing := sorted(known.keys() - found.keys()):
        raise _refused(path, f"it has no sample of the label {missing[0]!r}: add some, or leave the label out")
    if len(known) < 2:
        raise _refused(path, f"it has one label only, {next(iter(known))!r}: there is nothing to tell apart")


def _encode(
    reader: TextReader, task: Task, number: int, row: Mapping[str, Any], labels: tuple[int, ...]
) -> LabelledText:
    if task is Task.CLASSIFICATION:
        return LabelledText(reader.sample(number, row).ids, labels, number)
    encoding = reader.tokenizer.encode(" ".join(row["tokens"]))
    found = token_labels(row["tokens"], labels, encoding.offsets)
    return LabelledText(tuple(encoding.ids), tuple(found), number)


def _within(text: LabelledText, task: Task, context_tokens: int) -> LabelledText:
    """Cut to the context; the last token stays, which closes the text."""
    if len(text.ids) <= context_tokens:
        return text

    def cut(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[: context_tokens - 1] + values[-1:]

    labels = cut(text.labels) if task is Task.TOKEN_CLASSIFICATION else text.labels
    return LabelledText(cut(text.ids), labels, text.line)


def _refused(path: Path, problem: str) -> PreparationError:
    return PreparationError(Reason.UNUSABLE_TRAINING, f"{path.name}: {problem}")
