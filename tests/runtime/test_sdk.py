"""The engine in this process, over the example pair."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import doctest
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

from redis_server import RedisServer, write_directory

from sixfold_api.generation import DraftLength
from sixfold_api.kv_reuse import KVCacheReuseSpec, KVStore, RedisSpec
from sixfold_api.pods import SecretKeyRef
from sixfold_api.scalars import FullWeights
from sixfold_runtime import sdk
from sixfold_runtime.sdk import InferenceEngine, ModelLoadError, RequestError

MODELS = Path(__file__).parents[2] / "examples" / "models"
CHAT, DRAFT = MODELS / "chat", MODELS / "chat-draft"
PROMPT = "HAMLET:\nTo be, or not"
GREEDY = {"max_tokens": 24, "temperature": 0.0}


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chat model with other weights of the same shape, as quantising gives them."""
    folder = Path(shutil.copytree(CHAT, tmp_path_factory.mktemp("models") / "perturbed"))
    generator = torch.Generator().manual_seed(2)
    weights = load_file(folder / "model.safetensors")
    noisy = {
        name: (tensor.float() * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in weights.items()
    }
    save_file(noisy, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(perturbed: Path) -> Iterator[InferenceEngine]:
    with InferenceEngine(
        CHAT, draft=DRAFT, quantized=perturbed, level=2, num_tokens=4, length=DraftLength.FIXED
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def full_weights(engine: InferenceEngine) -> None:
    engine.level = 2


def test_the_examples_of_the_documentation(classifiers: Path) -> None:
    folders = {"chat": CHAT, "chat_draft": DRAFT, "sentiment": classifiers / "intent"}
    for place in (sdk, InferenceEngine):
        found = doctest.DocTestFinder(recurse=False).find(place, globs=vars(sdk) | folders)
        assert [test for test in found if test.examples]
        for test in found:
            assert doctest.DocTestRunner().run(test).failed == 0


def test_speculation_gives_the_same_text(engine: InferenceEngine) -> None:
    plain, drafted = engine.generate(PROMPT, **GREEDY), engine.speculate(PROMPT, **GREEDY)
    assert drafted.text == plain.text
    assert (plain.drafted, plain.accepted) == (0, 0)
    assert drafted.drafted >= drafted.accepted > 0
    assert drafted.completion_tokens == plain.completion_tokens
    seeded = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    assert engine.speculate(PROMPT, **seeded).text == engine.generate(PROMPT, **seeded).text


def test_streams_give_the_same_answer(engine: InferenceEngine) -> None:
    for whole, stream in (
        (engine.generate(PROMPT, **GREEDY), engine.generate_stream(PROMPT, **GREEDY)),
        (engine.speculate(PROMPT, **GREEDY), engine.speculate_stream(PROMPT, **GREEDY)),
    ):
        pieces = list(stream)
        assert len(pieces) > 1
        assert "".join(pieces) == whole.text
        assert stream.result is not None
        assert stream.result.finish_reason == whole.finish_reason


def test_a_closed_stream_stops_the_generation(engine: InferenceEngine) -> None:
    stream = engine.generate_stream(PROMPT, max_tokens=3000, temperature=1.0, seed=1)
    next(iter(stream))
    stream.close()
    assert stream.result is None
    assert engine.generate(PROMPT, max_tokens=1).completion_tokens == 1
    assert engine._engine.running == 0


def test_the_three_forms_of_a_prompt(engine: InferenceEngine) -> None:
    ids = engine._facts.tokenizer.tokenizer.encode(PROMPT).ids
    assert engine.generate(token_ids=ids, **GREEDY).text == engine.generate(PROMPT, **GREEDY).text
    messages = [{"role": "user", "content": "Who art thou?"}]
    reply = engine.generate(messages=messages, **GREEDY)
    assert reply.prompt_tokens > 4
    assert "\n\n" not in reply.text, "the model's own stop strings end a turn"
    with pytest.raises(ValueError, match="exactly one"):
        engine.generate(PROMPT, token_ids=ids)
    with pytest.raises(ValueError, match="exactly one"):
        engine.generate()


def test_logprobs_tell_each_token(engine: InferenceEngine) -> None:
    for answer in (engine.generate(PROMPT, **GREEDY, logprobs=3), engine.speculate(PROMPT, **GREEDY, logprobs=3)):
        assert len(answer.logprobs) == answer.completion_tokens
        assert b"".join(token.token for token in answer.logprobs).decode() == answer.text
        assert all(token.token_id == token.top[0].token_id for token in answer.logprobs), "greedy takes the best"


def test_threads_share_the_engine(engine: InferenceEngine) -> None:
    alone = [engine.generate(f"KING:\n{number}", **GREEDY).text for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(lambda number: engine.speculate(f"KING:\n{number}", **GREEDY).text, range(6))
        assert list(together) == alone


def test_levels_choose_the_weights(engine: InferenceEngine, perturbed: Path) -> None:
    assert engine.state.full_weights is FullWeights.RESIDENT
    quantized = engine.generate(PROMPT, **GREEDY)
    engine.level = 0
    full = engine.generate(PROMPT, **GREEDY)
    assert (quantized.level, full.level) == (2, 0)
    assert quantized.text != full.text
    with InferenceEngine(perturbed) as alone:
        assert alone.generate(PROMPT, **GREEDY).text == quantized.text


def test_what_cannot_be_asked(engine: InferenceEngine) -> None:
    with pytest.raises(RequestError, match="context"):
        engine.generate("word " * 5000)
    with pytest.raises(ValueError, match="temperature"):
        engine.generate(PROMPT, temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown options: heat"):
        engine.generate(PROMPT, heat=1)  # type: ignore[call-arg]
    with pytest.raises(RequestError):
        engine.generate(token_ids=[10**6])
    engine.level = 1
    with pytest.raises(ValueError, match="the level is 1, and speculation is on from level 2"):
        engine.speculate(PROMPT)
    with pytest.raises(ValueError, match="must be 0 to 3"):
        engine.level = 4


def test_speculation_needs_a_usable_draft(tmp_path: Path) -> None:
    with InferenceEngine(CHAT) as engine, pytest.raises(ValueError, match="needs a draft model"):
        engine.speculate(PROMPT)
    with InferenceEngine(CHAT, draft=tmp_path / "none") as engine:
        assert engine.generate(PROMPT, max_tokens=1).completion_tokens == 1
        with pytest.raises(ModelLoadError, match="is no folder"):
            engine.speculate(PROMPT)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no folder"):
        InferenceEngine(tmp_path / "none")


def test_the_beginning_of_a_conversation_is_computed_once(tmp_path: Path) -> None:
    """By this engine from its memory, and by another one through Redis; not where a request or the level says no."""
    history, reuse = PROMPT * 20, KVCacheReuseSpec(block_tokens=16, min_prompt_tokens=17)
    with RedisServer(tmp_path / "redis") as redis:
        address = write_directory(tmp_path / "address", redis.url)
        with InferenceEngine(CHAT, kv_cache_reuse=reuse, redis_directory=address) as first:
            plain = first.generate(history, **GREEDY, kv_reuse=False)
            kept = first.generate(history, **GREEDY, conversation="1")
            assert (kept.text, kept.cached_tokens, plain.cached_tokens) == (plain.text, 0, 0)
            assert first._engine.shelf is not None and first._engine.shelf.store.settle(30)
            found = first.generate(history, **GREEDY, conversation="1")
            assert found.cached_tokens == (found.prompt_tokens - 1) // 16 * 16
            first.level = 2
            assert first.generate(history, **GREEDY).cached_tokens == 0
        with InferenceEngine(CHAT, redis_directory=address, draft=DRAFT) as second:
            drafted = second.speculate(history, **GREEDY)
            assert drafted.cached_tokens == 0, "blocks of another size are none"
        with InferenceEngine(CHAT, kv_cache_reuse=reuse, redis_directory=address, draft=DRAFT) as second:
            drafted = second.speculate(history, **GREEDY)
        assert (drafted.text, drafted.cached_tokens) == (found.text, found.cached_tokens)
        assert drafted.accepted > 0


def test_reuse_through_redis_needs_its_address() -> None:
    redis = RedisSpec(url_secret_ref=SecretKeyRef(name="redis", key="url"))
    with pytest.raises(ValueError, match="redis_directory=FOLDER"):
        InferenceEngine(CHAT, kv_cache_reuse=KVCacheReuseSpec(store=KVStore.REDIS, redis=redis))
