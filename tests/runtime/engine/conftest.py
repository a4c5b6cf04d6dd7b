"""Tiny models with random weights, made with transformers: real files, real loading, real forwards."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent)]

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sixfold_api.runtime_config import RuntimeConfig, ServedModel
from sixfold_api.scalars import Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine.classification import ClassificationRunner
from sixfold_runtime.engine.generation import GenerationRunner
from sixfold_runtime.engine.loader import LoadedModel, load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.work import Output
from sixfold_runtime.settings import RuntimeSettings

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCABULARY = 320
CORPUS = [
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer.",
    "你好世界。今天天气很好。 😀🎉🚀 naïve café, straße, Ωmega",
    "The quick brown fox jumps over the lazy dog. 0123456789\n\nUser: hello\nAssistant: hi\n",
]


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE so small that most CJK characters and emoji span several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_decoder(folder: Path, architecture: str = "Llama", **changes: Any) -> Path:
    """A small decoder with grouped heads; large random weights keep its greedy output from repeating itself."""
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
    }
    torch.manual_seed(7)
    config = getattr(transformers, f"{architecture}Config")(**{**settings, **changes})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    if not config.tie_word_embeddings:
        model.lm_head.weight.data[:2] = 0  # greedy output never holds <s> or </s>: it ends where a test says
    model.generation_config.stop_strings = ["\n\n"]
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_classifier(folder: Path) -> Path:
    import transformers

    torch.manual_seed(8)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        id2label={0: "bad", 1: "so-so", 2: "good"},
        label2id={"bad": 0, "so-so": 1, "good": 2},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Collector:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.levels: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}
        self.dones: dict[str, Done] = {}

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        for chunk in chunks:
            assert chunk.id not in self.dones, "nothing follows a Done"
            self.pieces.setdefault(chunk.id, []).append(chunk.text)
            self.tokens[chunk.id] = self.tokens.get(chunk.id, 0) + chunk.tokens
            if chunk.level is not None:
                self.levels.setdefault(chunk.id, []).append(chunk.level)
        for done in dones:
            assert done.id not in self.dones, "one Done a request"
            self.dones[done.id] = done

    def take(self, outputs: Sequence[Output]) -> None:
        for sink, output in outputs:
            assert sink is self
            self.deliver([output] if isinstance(output, Chunk) else [], [output] if isinstance(output, Done) else [])

    def text(self, request_id: str) -> str:
        return "".join(self.pieces.get(request_id, []))


class Config:
    """The configuration in use, with a level that a test can change."""

    def __init__(self) -> None:
        self.value = default_config()

    def __call__(self) -> RuntimeConfig:
        return self.value

    def set_level(self, level: int) -> None:
        self.value = default_config(level)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture(scope="session")
def new_collector() -> Callable[[], Collector]:
    return Collector


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.fixture(scope="session")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="session")
def classifier_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="session")
def chat(decoder_folder: Path) -> ServedModel:
    return ServedModel(name="chat", task=Task.GENERATION, path=str(decoder_folder))


@pytest.fixture(scope="session")
def intent(classifier_folder: Path) -> ServedModel:
    return ServedModel(name="intent", task=Task.CLASSIFICATION, path=str(classifier_folder))


@pytest.fixture(scope="session")
def decoder(chat: ServedModel) -> LoadedModel:
    return load(chat, CPU)


@pytest.fixture(scope="session")
def classifier(intent: ServedModel) -> LoadedModel:
    return load(intent, CPU)


@pytest.fixture(scope="session")
def reference() -> Callable[[LoadedModel], Any]:
    """The transformers module of a model that the engine computes itself, in fp32: what its output should be."""
    import transformers

    modules: dict[str, Any] = {}

    def load_module(model: LoadedModel) -> Any:
        path = model.served.path
        if path not in modules:
            modules[path] = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        return modules[path]

    return load_module


@pytest.fixture(scope="session")
def new_decoder() -> Callable[..., Path]:
    """save_decoder(folder, architecture, **config changes)."""
    return save_decoder


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a model folder that a test may damage."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def new_runner(decoder: LoadedModel, config: Config) -> Callable[..., GenerationRunner]:
    """A runner over the tiny decoder, or over another model."""

    def make(model: LoadedModel = decoder, **limits: Any) -> GenerationRunner:
        metrics = EngineMetrics(RuntimeSettings()).of(model.served.name)
        runner = GenerationRunner(model, Limits(**limits), config, metrics)
        runner.warm_up(1 << 30)
        return runner

    return make


@pytest.fixture
def new_classifier(classifier: LoadedModel, config: Config) -> Callable[..., ClassificationRunner]:
    def make(model: LoadedModel = classifier, **limits: Any) -> ClassificationRunner:
        metrics = EngineMetrics(RuntimeSettings()).of(model.served.name)
        return ClassificationRunner(model, Limits(**limits), config, metrics)

    return make
