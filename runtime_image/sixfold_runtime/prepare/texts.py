"""Text of the user's own for calibration and evaluation: JSON lines with `text` or a chat's `messages`, and `label`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from sixfold_api.precision import DEFAULT_SAMPLES, TextSource
from sixfold_api.variant import CLAIM_SCHEME
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.sources import claim_root, require_inside

MIN_TOKENS = 16
"""Shorter lines tell next to nothing about a model; they are passed over."""
MIN_EVALUATED = 8
"""Held-out texts that a measurement needs, where nothing else is asked for."""
_MAX_LINE_CHARACTERS = 10**7


@dataclass(frozen=True)
class Sample:
    """One line: its number from 1, its text as the model reads it, the token ids, and the class index if labelled."""

    line: int
    text: str
    ids: tuple[int, ...]
    label: int | None = None


class UnknownLabelError(ValueError):
    """A line's label is none of the model's."""


class TextReader:
    """Turns lines into token ids as the engine would: chats through the model's own template."""

    def __init__(self, folder: Path, labels: Sequence[str] = ()) -> None:
        """`folder` holds the model; `labels` are a classifier's, in the order of its head."""
        import msgspec

        from sixfold_runtime.engine.protocol import TokenizerBundle
        from sixfold_runtime.engine.tokenizer import load_tokenizer
        from sixfold_runtime.gateway.tokenizer import compile_template

        loaded = load_tokenizer(folder)
        bundle = msgspec.json.decode(loaded.bundle, type=TokenizerBundle)
        self.tokenizer: Tokenizer = loaded.tokenizer
        self._template = compile_template(bundle.chat_template) if bundle.chat_template else None
        self._special_tokens = bundle.special_tokens
        self._labels = {label: index for index, label in enumerate(labels)}

    def sample(self, line: int, row: Any) -> Sample:
        """Raises ValueError with what is wrong with the row."""
        if not isinstance(row, dict):
            raise ValueError(f"it holds {type(row).__name__}, expected an object")
        if isinstance(row.get("text"), str):
            text, special_tokens = row["text"], True
        elif isinstance(row.get("messages"), list):
            text, special_tokens = self._render(row["messages"]), False
        else:
            raise ValueError("it needs `text`, or `messages` of a chat")
        ids = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return Sample(line, text, tuple(ids), self._label(row))

    def _render(self, messages: list[Any]) -> str:
        if self._template is None:
            raise ValueError("it has `messages`, and the model has no chat template: give `text`")
        try:
            return self._template.render(messages=messages, add_generation_prompt=False, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ValueError(f"the model's chat template refuses its messages: {error}") from error

    def _label(self, row: Mapping[str, Any]) -> int | None:
        label = row.get("label")
        if label is None or not self._labels:
            return None
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self._labels):
            return label
        if label in self._labels:
            return self._labels[label]
        raise UnknownLabelError(f"its label {label!r} is none of the model's: {', '.join(self._labels)}")


def locate(claims: Path, source: TextSource) -> Path:
    """The file of a text source. Raises PreparationError: SourceNotFound, UnsafePath."""
    claim, _, path = source.uri.removeprefix(CLAIM_SCHEME).partition("/")
    root = claim_root(claims, claim)
    if not (root / path).is_file():
        raise PreparationError(Reason.SOURCE_NOT_FOUND, f"the claim {claim!r} has no file {path!r}: check the path")
    require_inside(root / path, root)
    return root / path


def read_samples(
    path: Path,
    source: TextSource,
    reader: TextReader,
    reason: Reason,
    *,
    labelled: bool,
    needed: int | None = None,
) -> list[Sample]:
    """The first lines of a file that are long enough, as many as the source asks for.

    Calibration needs the 128 that are asked for where the source says nothing; for evaluation a shorter file will do.

    Args:
        reason: of the failure, by what the text is for.
        labelled: every line must have a label; short lines count then, empty text doesn't do.
        needed: fewest lines; where the source doesn't say how many, all are read then, and not the first 128.

    Raises PreparationError: `reason` if a line is no sample or too few are left, LabelMismatch.
    """
    wanted = source.samples or (DEFAULT_SAMPLES if needed is None else sys.maxsize)
    samples: list[Sample] = []
    short = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if len(samples) == wanted:
                    break
                if not line.strip():
                    continue
                sample = _parse(line, number, reader, labelled)
                if labelled or len(sample.ids) >= MIN_TOKENS:
                    samples.append(sample)
                else:
                    short += 1
    except ValueError as error:
        unknown = isinstance(error.__cause__, UnknownLabelError)
        raise PreparationError(Reason.LABEL_MISMATCH if unknown else reason, f"{path.name}: {error}") from error
    if needed is None:
        needed = MIN_EVALUATED if source.samples is None and reason is Reason.UNUSABLE_EVALUATION else wanted
    elif source.samples is not None:
        needed = max(needed, source.samples)
    if len(samples) < needed:
        passed_over = f" ({short} lines have fewer than {MIN_TOKENS} tokens and don't count)" if short else ""
        raise PreparationError(
            reason,
            f"{path.name} holds {len(samples)} samples{passed_over} and {needed} are asked for: "
            "add text of your own business, or ask for fewer samples",
        )
    return samples


def _parse(line: str, number: int, reader: TextReader, labelled: bool) -> Sample:
    if len(line) > _MAX_LINE_CHARACTERS:
        raise ValueError(f"line {number} has more than {_MAX_LINE_CHARACTERS} characters")
    try:
        sample = reader.sample(number, json.loads(line))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: {error}") from error
    if labelled and sample.label is None:
        raise ValueError(f"line {number}: a classifier is measured on labelled text: add `label`")
    if labelled and not sample.text.strip():
        raise ValueError(f"line {number}: its text is empty: a classifier has nothing to read")
    return sample


def within(ids: tuple[int, ...], context_tokens: int) -> tuple[int, ...]:
    """Token ids cut to the context; the last one stays, which closes the text."""
    return ids if len(ids) <= context_tokens else ids[: context_tokens - 1] + ids[-1:]


def windows(samples: Sequence[Sample], window_tokens: int) -> list[tuple[int, ...]]:
    """The samples' token ids, cut into windows of at most that length; the same for every set of weights."""
    cut = [
        sample.ids[start : start + window_tokens]
        for sample in samples
        for start in range(0, len(sample.ids), window_tokens)
    ]
    return [window for window in cut if len(window) > 1]
