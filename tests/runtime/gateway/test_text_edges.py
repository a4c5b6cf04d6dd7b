"""Text whose characters and stop strings lie across tokens: what streams is what is answered whole.

The model says the same over and over, one byte a token: each token names the next one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sixfold_api.runtime_config import ServedModel
from sixfold_api.scalars import Task

REFRAIN = "é你🎉stop!"
"""Of bytes that are all different: the next one follows from the last one alone."""
REPLACEMENT = "\ufffd"
REQUEST: dict[str, Any] = {"model": "refrain", "prompt": "x", "temperature": 0}


@pytest.fixture(scope="module")
def refrain(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose layer adds nothing and whose head maps each token to its successor."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("refrain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / "chat" / name, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.token_to_id(letter) for letter in _letters(REFRAIN.encode())]
    size = 320
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokens[0]] = 0.5
        for token, following in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
            model.lm_head.weight[following, token] = 1.0
    model.save_pretrained(folder)
    return folder


def _letters(data: bytes) -> list[str]:
    """The letter that stands for each byte in the vocabulary of a byte-level tokenizer."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in data]


@pytest.fixture(scope="module")
def client(refrain: Path, shared_engine: Any, shared_gateway: Any) -> openai.OpenAI:
    engine = shared_engine(ServedModel(name="refrain", task=Task.GENERATION, path=str(refrain)))
    return shared_gateway(engine.port).openai()


def streamed(client: openai.OpenAI, **changes: Any) -> tuple[list[str], str]:
    """The pieces of text, and why it ended."""
    events = list(client.completions.create(**{**REQUEST, **changes}, stream=True))
    return [event.choices[0].text for event in events[:-1]], events[-1].choices[0].finish_reason


def whole(client: openai.OpenAI, **changes: Any) -> tuple[str, str]:
    (choice,) = client.completions.create(**{**REQUEST, **changes}).choices
    return choice.text, choice.finish_reason


def test_a_character_comes_with_its_last_token_and_whole(client: openai.OpenAI) -> None:
    pieces, reason = streamed(client, max_tokens=len(REFRAIN.encode()) * 3)
    assert pieces == list(REFRAIN * 3)
    assert reason == "length"


@pytest.mark.parametrize("count", range(1, 10))
def test_an_answer_that_ends_within_a_character_says_so_once(client: openai.OpenAI, count: int) -> None:
    pieces, _ = streamed(client, max_tokens=count)
    text, _ = whole(client, max_tokens=count)
    assert "".join(pieces) == text
    ends_within = count not in (2, 5, 9)
    complete = sum(count >= end for end in (2, 5, 9))
    assert text == REFRAIN[:complete] + REPLACEMENT * ends_within
    assert REPLACEMENT not in "".join(pieces[:-1])


STOPS = sorted({(REFRAIN * 2)[start : start + size] for start in range(len(REFRAIN)) for size in (1, 2, 5, 9)})


@pytest.mark.parametrize("stop", STOPS)
def test_no_part_of_a_stop_string_is_seen(client: openai.OpenAI, stop: str) -> None:
    said = REFRAIN * 3
    expected = said[: said.index(stop)]
    pieces, reason = streamed(client, max_tokens=40, stop=[stop, "never said"])
    assert "".join(pieces) == expected
    assert (*whole(client, max_tokens=40, stop=stop), reason) == (expected, "stop", "stop")
    for index in range(len(pieces)):
        assert expected.startswith("".join(pieces[:index]))


@pytest.mark.parametrize("count", range(1, 30))
def test_what_only_began_like_a_stop_string_is_said_in_the_end(client: openai.OpenAI, count: int) -> None:
    options = {"max_tokens": count, "stop": ["stop?", "🎉stopp", "!é你x"]}
    pieces, reason = streamed(client, **options)
    text, _ = whole(client, max_tokens=count)
    assert "".join(pieces) == text == whole(client, **options)[0]
    assert reason == "length"


def test_the_raw_stream_is_utf8_in_every_event(client: openai.OpenAI) -> None:
    """Over HTTP and not through a client that might put broken characters together again."""
    url = f"{client.base_url}completions"
    headers = {"Accept-Encoding": "identity"}
    seen: list[str] = []
    body = {**REQUEST, "stream": True, "max_tokens": 2 * len(REFRAIN.encode())}
    with httpx.stream("POST", url, json=body, headers=headers, trust_env=False) as response:
        for part in response.iter_raw():
            assert part.endswith(b"\n\n")
            for event in part.decode().split("\n\n"):
                if event.startswith("data: {"):
                    seen.append(json.loads(event.removeprefix("data: "))["choices"][0]["text"])
    assert part.decode().endswith("data: [DONE]\n\n")
    assert "".join(seen) == REFRAIN * 2
    assert REPLACEMENT not in "".join(seen)
