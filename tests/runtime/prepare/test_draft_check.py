"""A draft against its target, on the example pair's draft: what is measured, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_runtime.prepare.draft_check import warnings

EXAMPLES = Path(__file__).parents[3] / "examples" / "models"
EVALUATION = json.dumps({"uri": "pvc://models/text/heldout.jsonl", "samples": 8})


@pytest.fixture
def pair(claims):
    """The draft and a copy of it as its target."""
    for source, name in (("chat-draft", "draft"), ("chat-draft", "target"), ("text", "text")):
        shutil.copytree(EXAMPLES / source, claims / "models" / name)
    return claims / "models"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def check(run_prepare):
    arguments = ["--draft-for", "pvc://models/target", "--target-name", "chat", "--evaluation", EVALUATION]
    return run_prepare("pvc://models/draft", "Generation", *arguments)


def test_a_draft_like_its_target_does_not_pay(pair, run_prepare):
    run = check(run_prepare)
    assert run.facts.parameters
    draft = run.summary.draft
    assert (draft.target, draft.parameter_ratio, draft.kl) == ("chat", "1", "0")
    assert float(draft.latency_ratio) > 0.2
    assert len(draft.warnings) == 2
    assert "the draft has 1.000 of the target's parameters" in draft.warnings[1]
    assert json.loads((pair / "draft" / "prepare-report.json").read_text())["draft"]["target"] == "chat"


def test_rows_beyond_the_tokenizer_are_no_mismatch(pair, run_prepare):
    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: torch.cat([tensors[name], torch.ones_like(tensors[name][:64])])}, path)
    edit(pair / "target" / "config.json", vocab_size=1024 + 64)
    assert check(run_prepare).summary.draft.kl == "0"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"pad_token_id": 5}, "pad_token_id is [0] for the draft and [5] for the target"),
        ("generation_config.json", {"eos_token_id": [2, 3]}, "eos_token_id is [2] for the draft and [2, 3]"),
        ("tokenizer.json", {"pre_tokenizer": None}, "`pre_tokenizer`"),
    ],
)
def test_a_draft_with_another_tokenizer_is_refused(pair, run_prepare, file, change, message):
    edit(pair / "target" / file, **change)
    if file == "config.json":
        generation = json.loads((pair / "target" / "generation_config.json").read_text())
        generation.pop("pad_token_id", None)
        (pair / "target" / "generation_config.json").write_text(json.dumps(generation))
    failure = check(run_prepare).failure
    assert failure.reason == "TokenizerMismatch"
    assert message in failure.message


def test_another_vocabulary_is_refused_with_a_token(pair, run_prepare):
    path = pair / "target" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    last, before = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]
    path.write_text(json.dumps(content))
    failure = check(run_prepare).failure
    assert failure.reason == "TokenizerMismatch"
    assert "is in one of them only" in failure.message


def test_warnings_name_the_figures():
    assert warnings(0.2, 0.1, 0.149) == []
    assert [text.split()[-2] for text in warnings(0.21, 0.11, 0.15)] == ["0.2", "0.1", "0.15"]
