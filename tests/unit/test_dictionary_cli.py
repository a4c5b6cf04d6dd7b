"""`sixfold dictionary train`: what it reads, what it says when that won't do, and that the result is worth having."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sixfold_runtime.cli import app
from sixfold_runtime.dictionary_cli import read_answers, sent_bytes
from sixfold_runtime.gateway.dictionary import usable


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["dictionary", "train", *map(str, arguments)], env={"COLUMNS": "300"})


def answer(number: int) -> str:
    return f"The answer to question {number} is {number * number}, and so to bed."


def test_answers_are_paragraphs_texts_or_the_assistants_messages(tmp_path: Path) -> None:
    text = tmp_path / "answers.txt"
    text.write_text("one\nand more\n\n\n \ntwo\n")
    assert list(read_answers(text)) == ["one\nand more", "two"]
    lines = tmp_path / "answers.jsonl"
    messages = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]
    lines.write_text(f"{json.dumps({'text': 'three'})}\n\n{json.dumps({'messages': messages})}\n")
    assert list(read_answers(lines)) == ["three", "me"]


def test_it_saves_what_it_says(tmp_path: Path) -> None:
    text, made = tmp_path / "answers.txt", tmp_path / "made"
    text.write_text("\n\n".join(map(answer, range(60))))
    done = run(text, "-o", made, "--size", 1024)
    assert done.exit_code == 0, done.output
    data = made.read_bytes()
    assert len(data) <= 1024
    usable(data)
    unseen = [answer(number) for number in range(100, 120)]
    assert sent_bytes(unseen, "chat", data) < 0.9 * sent_bytes(unseen, "chat", None)
    assert f"kubectl create configmap NAME --from-file=dictionary={made}" in done.output


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"one\n\ntwo", "1 answers are too few"),
        ("a.txt", b"", "0 answers are too few"),
        ("a.txt", b"\xff\xfe", "as UTF-8 text"),
        ("a.jsonl", b'{"text": "fine"}\n{"txt": "oops"}\n', "line 2: expected `text`"),
        ("a.jsonl", b"[1]\n", "line 1: expected `text`"),
        ("a.jsonl", b"{", "line 1: expected `text`"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": null}]}', "line 1: expected `text`"),
    ],
)
def test_text_that_wont_do_is_explained(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    done = run(tmp_path / name, "-o", tmp_path / "made")
    assert done.exit_code == 1
    assert words in done.output
    assert not (tmp_path / "made").exists()
