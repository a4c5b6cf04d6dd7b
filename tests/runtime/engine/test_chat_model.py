"""The shipped example models: the engine's output on them is transformers' output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.engine.detokenize import Detokenizer
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.protocol import Generate, Sampling

MODELS = Path(__file__).parents[3] / "examples" / "models"
PROMPTS = (
    "HAMLET:\nTo be, or not to be",
    "ROMEO:\nBut soft! What light through yonder window breaks? It is the east, and Juliet is the sun.\n\nJULIET:\n",
    "KING:\nNow is the winter of our discontent " * 12,
    "A",
)


@pytest.fixture(scope="module", params=["chat", "chat-draft"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    served = ServedModel(name=request.param, task=Task.GENERATION, path=str(MODELS / request.param))
    return load(served, torch.device("cpu"))


def test_greedy_output_equals_generate(
    model: LoadedModel,
    new_runner: Callable[..., GenerationRunner],
    collector: Any,
    reference: Callable[[LoadedModel], Any],
) -> None:
    assert model.decoder is not None
    tokenizer = model.tokenizer.tokenizer
    prompts = {str(index): tokenizer.encode(text).ids for index, text in enumerate(PROMPTS)}
    runner = new_runner(model, prefill_tokens=128)
    for name, ids in prompts.items():
        runner.submit((collector, name), Generate(name, "chat", ids, Sampling(max_tokens=24, temperature=0)))
    while runner.running or runner.waiting:
        collector.take(runner.step())
    for name, ids in prompts.items():
        generated = reference(model).generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, stop_strings=None
        )
        kept = [token for token in generated[0, len(ids) :].tolist() if token not in model.eos_ids]
        assert collector.text(name) == tokenizer.decode(kept), name


def test_the_pair_shares_one_tokenizer() -> None:
    contents = {(MODELS / name / "tokenizer.json").read_bytes() for name in ("chat", "chat-draft")}
    assert len(contents) == 1


def test_what_a_chat_needs_is_there(model: LoadedModel) -> None:
    # A draft only proposes tokens: its target decides where an answer ends.
    assert model.stop_strings == (() if model.served.name == "chat-draft" else ("\n\n",))
    assert model.context_tokens >= 4096
    assert model.eos_ids


@pytest.mark.parametrize(
    "text", ["Grüße, 你好 😀 naïve Ω", "To be, or not to be:\n\nthat is", "  two  spaces\t", "\u200d👩"]
)
def test_its_tokenizer_writes_any_text_piece_by_piece(model: LoadedModel, text: str) -> None:
    tokenizer = model.tokenizer.tokenizer
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text
