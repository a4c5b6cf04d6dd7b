"""Task slices of a model that generates: what they compute, beside whom, and how they come and go meanwhile."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.generation import DraftLength, Overlap
from sixfold_api.modes import Mode
from sixfold_api.runtime_config import (
    Draft,
    SamplerPipelineConfig,
    ServedModel,
    SpeculativeConfig,
    SubgraphsConfig,
    TaskConfig,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.config import default_config
from sixfold_runtime.engine import slice_loader
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.engine import Engine
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Chunk, Done, Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.slice_file import slice_path, write_slice
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.prepare.int8 import quantise
from sixfold_runtime.settings import RuntimeSettings

SECONDS = 60.0
WIDTH, INNER, LAYERS, RANK, BOTTLENECK = 32, 64, 3, 4, 6
PROMPT = [5, 6, 7, 8, 9, 10, 11]
TOKENS = 24
TUNED, DELTAS, ADAPTERS = "tuned", "deltas", "adapters"
"""The tasks: feed-forward parts replaced in two layers, low-rank deltas, bottlenecks behind the last two layers."""


@dataclass(frozen=True)
class Models:
    """The trunk with its slices, and what each task's answers have to be."""

    chat: ServedModel
    references: dict[str, Any]
    """transformers' modules: the trunk's as "", and each task's without any slicing."""

    def greedy(self, task: str, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS) -> list[int]:
        ids = torch.tensor([list(prompt)])
        made = self.references[task].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        answer: list[int] = made[0, len(prompt) :].tolist()
        return answer


def noise(*size: int, seed: int, scale: float = 0.15) -> torch.Tensor:
    return scale * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> Models:
    folder = tmp_path_factory.mktemp("tasks")
    trunk = Path(shutil.copytree(decoder_folder, folder / "chat"))
    weights = load_file(trunk / "model.safetensors")
    name = "model.layers.{}.mlp.{}_proj".format
    tuned, slices = dict(weights), {TUNED: {}, DELTAS: {}, ADAPTERS: {}}  # type: ignore[var-annotated]
    for layer in (0, 2):
        for index, part in enumerate(("gate", "up", "down")):
            key = f"{name(layer, part)}.weight"
            slices[TUNED][key] = tuned[key] = weights[key] + noise(*weights[key].shape, seed=10 * layer + index)
    merged = dict(weights)
    for layer, part in ((0, "up"), (1, "down"), (2, "gate"), (2, "up")):
        key = name(layer, part)
        outputs, inputs = weights[f"{key}.weight"].shape
        a, b = noise(RANK, inputs, seed=layer, scale=0.5), noise(outputs, RANK, seed=layer + 50, scale=0.3)
        slices[DELTAS] |= {f"{key}.delta_a": a, f"{key}.delta_b": b}
        merged[f"{key}.weight"] = weights[f"{key}.weight"] + b @ a
    for layer in (1, 2):
        shapes = {"down.weight": (BOTTLENECK, WIDTH), "down.bias": (BOTTLENECK,)}
        shapes |= {"up.weight": (WIDTH, BOTTLENECK), "up.bias": (WIDTH,)}
        for index, (part, shape) in enumerate(shapes.items()):
            slices[ADAPTERS][f"adapters.{layer}.{part}"] = noise(*shape, seed=70 + 10 * layer + index, scale=0.4)
    fingerprint = trunk_fingerprint(TensorStore(trunk))
    for task, tensors in slices.items():
        write_slice(slice_path(trunk, task), tensors, Task.GENERATION, (), fingerprint)
    references = {"": reference(decoder_folder, folder / "plain", weights)}
    references[TUNED] = reference(decoder_folder, folder / TUNED, tuned)
    references[DELTAS] = reference(decoder_folder, folder / DELTAS, merged)
    references[ADAPTERS] = adapted(reference(decoder_folder, folder / ADAPTERS, weights), slices[ADAPTERS])
    return Models(ServedModel(name="chat", task=Task.GENERATION, path=str(trunk)), references)


def reference(source: Path, folder: Path, weights: dict[str, torch.Tensor]) -> Any:
    import transformers

    shutil.copytree(source, folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    module.generation_config.stop_strings = None
    return module


def mlp_linears() -> list[str]:
    return [f"model.layers.{layer}.mlp.{part}_proj" for layer in range(LAYERS) for part in ("gate", "up", "down")]


def adapted(module: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A(z) = z + up(gelu(down(z))), written out."""

    def behind(layer: int) -> Callable[..., torch.Tensor]:
        down, down_bias, up, up_bias = (
            tensors[f"adapters.{layer}.{part}"] for part in ("down.weight", "down.bias", "up.weight", "up.bias")
        )

        def hook(_: Any, __: Any, z: torch.Tensor) -> torch.Tensor:
            return z + torch.nn.functional.gelu(z @ down.T + down_bias) @ up.T + up_bias

        return hook

    for layer in (1, 2):
        module.model.layers[layer].mlp.register_forward_hook(behind(layer))
    return module


class Sink:
    """Keeps what it gets, and lets a test wait for it."""

    def __init__(self) -> None:
        self.dones: dict[str, Done] = {}
        self.tokens: dict[str, int] = {}
        self.texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def deliver(self, chunks: Sequence[Chunk], dones: Sequence[Done]) -> None:
        with self._changed:
            for chunk in chunks:
                self.tokens[chunk.id] = self.tokens.get(chunk.id, 0) + chunk.tokens
                self.texts[chunk.id] = self.texts.get(chunk.id, "") + chunk.text
            self.dones.update((done.id, done) for done in dones)
            self._changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        ends = time.monotonic() + SECONDS
        with self._changed:
            while not until():
                self._changed.wait(0.05)  # what isn't of the sink, such as an idle engine, tells nobody
                assert time.monotonic() < ends, (self.tokens, self.dones)

    def wait_done(self, *ids: str) -> None:
        self.wait(lambda: self.dones.keys() >= set(ids))


@dataclass
class Scene:
    """An engine over one model, and its configuration."""

    served: ServedModel
    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics(RuntimeSettings()))
    sink: Sink = field(default_factory=Sink)
    limits: Limits = field(default_factory=Limits)
    settings: dict[str, Any] = field(default_factory=dict)
    level: int = 3
    told: threading.Event = field(default_factory=threading.Event)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self._config = self._new_config()

    def _new_config(self) -> Any:
        config = default_config(self.level)
        modes = (*config.stable.active_modes, Mode.SUBGRAPHS)
        if self.level:
            modes = (*modes, Mode.QUANTIZED)
        settings = {"active_modes": modes, **self.settings}
        return config.model_copy(update={"stable": config.stable.model_copy(update=settings)})

    def configure(self, level: int | None = None, **settings: Any) -> None:
        self.level = self.level if level is None else level
        self.settings |= settings
        self._config = self._new_config()
        self.told.clear()
        if hasattr(self, "engine"):
            self.engine.config_changed()

    def tasks(self, *names: str, pinned: Sequence[str] = (), on_demand: bool = True, cache: int | None = None) -> None:
        tasks = tuple(TaskConfig(name=name, pinned=name in pinned) for name in names)
        self.configure(generation_subgraphs=SubgraphsConfig(tasks=tasks, on_demand=on_demand, cache_bytes=cache))

    def start(self) -> Scene:
        self.engine = Engine(
            [self.served], lambda: self._config, self.metrics, device="cpu", limits=self.limits, on_models=self.told.set
        )
        self.engine.start()
        self.wait_told()
        assert self.engine.is_ready, self.engine.why_not_ready()
        return self

    def wait_told(self) -> None:
        assert self.told.wait(SECONDS)

    def submit(self, request_id: str, task: str = "", prompt: Sequence[int] = PROMPT, **changes: Any) -> None:
        sampling = Sampling(**{"max_tokens": TOKENS, "temperature": 0.0, **changes.pop("sampling", {})})
        request = Generate(request_id, self.served.name, list(prompt), sampling, task=task, **changes)
        self.engine.submit(self.sink, [request])

    def answer(self, request_id: str) -> str:
        self.sink.wait_done(request_id)
        assert self.sink.dones[request_id].failure is None, self.sink.dones[request_id]
        return self.sink.texts[request_id]

    def number(self, name: str, task: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(
            name, {**self.metrics.labels, "variant": "chat", "task": task, **labels}
        )
        return 0.0 if found is None else found

    def code_of(self, request_id: str) -> str:
        failure = self.sink.dones[request_id].failure
        return failure.code if failure else ""

    @property
    def resident(self) -> set[str]:
        return {task for task in (TUNED, DELTAS, ADAPTERS) if self.number("sixfold_slice_resident_bytes", task)}


@pytest.fixture
def new_scene(models: Models) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(served: ServedModel = models.chat, **options: Any) -> Scene:
        scenes.append(Scene(served, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        if hasattr(scene, "engine"):
            scene.engine.stop()


@pytest.fixture(scope="module")
def expected(models: Models) -> Callable[..., str]:
    """The text that a task's own model gives."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(models.chat.path) / "tokenizer.json"))

    def text(task: str, prompt: Sequence[int] = PROMPT, tokens: int = TOKENS) -> str:
        decoded: str = tokenizer.decode(models.greedy(task, prompt, tokens))
        return decoded

    return text


NewScene = Callable[..., Scene]
ALL = (TUNED, DELTAS, ADAPTERS)
PROMPTS = {"": [9, 8, 7], TUNED: PROMPT, DELTAS: [40, 41, 42, 43], ADAPTERS: [100, 7, 3, 50, 61, 72]}


class TestWhatIsComputed:
    @pytest.mark.parametrize("task", ["", *ALL])
    def test_greedy_output_equals_that_of_the_task_s_own_model(
        self, new_scene: NewScene, expected: Callable[..., str], task: str
    ) -> None:
        scene = new_scene()
        scene.tasks(*ALL)
        scene.start()
        scene.submit("a", task)
        assert scene.answer("a") == expected(task)
        assert len({expected(other) for other in ("", *ALL)}) == 4, "each task says something else"

    @pytest.mark.parametrize("overlapping", [False, True], ids=["in line", "overlapping"])
    @pytest.mark.parametrize("drafted", [0, 4], ids=["plain", "speculative"])
    def test_rows_of_all_tasks_together_are_as_alone(
        self,
        new_scene: NewScene,
        models: Models,
        expected: Callable[..., str],
        drafted: int,
        overlapping: bool,
    ) -> None:
        """The draft is the trunk itself: often right, and never for what a slice changes."""
        draft = Draft(name="draft", path=models.chat.path)
        scene = new_scene(models.chat.model_copy(update={"draft": draft}), limits=Limits(prefill_tokens=16))
        scene.tasks(*ALL)
        speculative = SpeculativeConfig(num_tokens=drafted, length=DraftLength.FIXED) if drafted else None
        pipeline = SamplerPipelineConfig(workers=1, overlap=Overlap.ALWAYS) if overlapping else None
        scene.configure(speculative=speculative, sampler_pipeline=pipeline)
        scene.start()
        wanted = {f"{task}-{turn}": task for turn in range(3) for task in PROMPTS}
        for turn, (request_id, task) in enumerate(wanted.items()):
            scene.submit(request_id, task, PROMPTS[task], sampling={"max_tokens": 12 + turn})
        for turn, (request_id, task) in enumerate(wanted.items()):
            assert scene.answer(request_id) == expected(task, PROMPTS[task], 12 + turn), request_id
        if drafted:
            assert scene.sink.dones["-0"].accepted_tokens > 0, "the draft was at work"

    def test_a_dialogue_changes_its_task_from_turn_to_turn(
        self, new_scene: NewScene, models: Models, expected: Callable[..., str]
    ) -> None:
        scene = new_scene()
        scene.tasks(*ALL)
        scene.start()
        context = list(PROMPT)
        for turn, task in enumerate((TUNED, "", ADAPTERS, DELTAS, TUNED)):
            scene.submit(str(turn), task, context, sampling={"max_tokens": 8})
            assert scene.answer(str(turn)) == expected(task, context, 8)
            context += [*models.greedy(task, context, 8), 12, 13]

    @pytest.mark.parametrize("full_weights", [FullWeights.RESIDENT, FullWeights.SWAP])
    def test_slices_are_put_on_whichever_weights_answer(
        self,
        new_scene: NewScene,
        models: Models,
        expected: Callable[..., str],
        tmp_path: Path,
        full_weights: FullWeights,
    ) -> None:
        """The other set has the same weights under another name: so must be the answers, across level changes."""
        other = shutil.copytree(models.chat.path, tmp_path / "other", ignore=shutil.ignore_patterns("slices"))
        served = models.chat.model_copy(
            update={"quantized": WeightSet(name="other", path=str(other)), "full_weights": full_weights}
        )
        scene = new_scene(served, level=0)
        scene.tasks(*ALL, pinned=[TUNED])
        scene.start()
        for turn, level in enumerate((1, 0, 1)):
            scene.submit(f"long-{turn}", DELTAS, sampling={"max_tokens": 200})
            scene.sink.wait(lambda turn=turn: scene.sink.tokens.get(f"long-{turn}", 0) > 2)  # type: ignore[misc]
            scene.configure(level=level)
            for task in ALL:
                scene.submit(f"{task}-{turn}", task)
            for task in ALL:
                assert scene.answer(f"{task}-{turn}") == expected(task)
            assert scene.answer(f"long-{turn}") == expected(DELTAS, tokens=200)
        names = {model.weights.active for model in scene.engine.models.values() if model.weights}
        assert names == {"other"}

    def test_slices_on_quantised_weights(self, new_scene: NewScene, models: Models, tmp_path: Path) -> None:
        """Replacements stay as they are, deltas and adapters go beside what is rounded."""
        (tmp_path / "int8").mkdir()
        quantise(Path(models.chat.path), tmp_path / "int8", mlp_linears())
        served = models.chat.model_copy(update={"quantized": WeightSet(name="int8", path=str(tmp_path / "int8"))})
        scene = new_scene(served)
        scene.tasks(*ALL)
        scene.start()
        for task in PROMPTS:
            scene.submit(f"{task}-alone", task)
            scene.answer(f"{task}-alone")
        for task in PROMPTS:
            scene.submit(f"{task}-together", task)
        texts = [scene.answer(f"{task}-together") for task in PROMPTS]
        assert texts == [scene.answer(f"{task}-alone") for task in PROMPTS]
        assert len(set(texts)) == len(PROMPTS)
        assert scene.engine.models["chat"].state.weights == "int8"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loads wait until it is set."""
    opened, load = threading.Event(), slice_loader.load_slice

    def when_open(*args: Any) -> TaskSlice:
        assert opened.wait(SECONDS)
        return load(*args)

    monkeypatch.setattr(slice_loader, "load_slice", when_open)
    return opened


@pytest.fixture
def damaged(models: Models, tmp_path: Path) -> ServedModel:
    """The model with a slice that is cut off."""
    folder = Path(shutil.copytree(models.chat.path, tmp_path / "damaged"))
    path = slice_path(folder, TUNED)
    path.write_bytes(path.read_bytes()[:2000])
    return models.chat.model_copy(update={"path": str(folder)})


class TestComingAndGoing:
    def test_who_waits_for_a_slice_holds_up_nobody(
        self, new_scene: NewScene, expected: Callable[..., str], gate: threading.Event
    ) -> None:
        scene = new_scene()
        scene.tasks(*ALL)
        scene.start()
        scene.submit("waits", TUNED)
        scene.submit("goes")
        assert scene.answer("goes") == expected("")
        assert (scene.engine.running, scene.engine.waiting) == (0, 1)
        assert not scene.engine.models["chat"].can_step, "nothing spins meanwhile"
        gate.set()
        assert scene.answer("waits") == expected(TUNED)
        assert scene.number("sixfold_slice_requests_total", TUNED, result="miss") == 1
        scene.submit("again", TUNED)
        scene.answer("again")
        assert scene.number("sixfold_slice_requests_total", TUNED, result="hit") == 1
        assert scene.number("sixfold_slice_loads_total", TUNED, result="ok") == 1

    def test_one_budget_for_tasks_in_turn(self, new_scene: NewScene, expected: Callable[..., str]) -> None:
        """Only one of the two large ones fits beside the others' small ones: all are served, and none mid-answer."""
        scene = new_scene()
        scene.tasks(*ALL, cache=55_000)
        scene.start()
        for turn in range(4):
            for task in PROMPTS:
                scene.submit(f"{task}-{turn}", task, PROMPTS[task])
        for turn in range(4):
            for task in PROMPTS:
                assert scene.answer(f"{task}-{turn}") == expected(task, PROMPTS[task])
        scene.sink.wait(lambda: scene.engine.is_idle)
        assert sum(scene.number("sixfold_slice_resident_bytes", task) for task in ALL) <= 55_000

    def test_what_the_engine_refuses(self, new_scene: NewScene, damaged: ServedModel) -> None:
        scene = new_scene(damaged)
        scene.tasks(TUNED, DELTAS, "missing")
        scene.start()
        for request_id, task in (("unknown", "nope"), ("corrupt", TUNED), ("missing", "missing"), ("fine", DELTAS)):
            scene.submit(request_id, task)
        scene.answer("fine")
        scene.sink.wait_done("unknown", "corrupt", "missing")
        failures = {name: done.failure for name, done in scene.sink.dones.items() if done.failure}
        assert {name: (f.status, f.code) for name, f in failures.items()} == {
            "unknown": (404, "task_not_found"),
            "corrupt": (503, "slice_unusable"),
            "missing": (503, "slice_unusable"),
        }
        assert "it has tuned, deltas, missing" in failures["unknown"].message
        assert "is damaged" in failures["corrupt"].message and "is missing" in failures["missing"].message
        state = scene.engine.models["chat"].state
        assert state.ready and set(state.slice_errors) == {TUNED, "missing"}
        assert scene.engine.models["chat"].unsupported == {}, "the other task is served"

    def test_a_load_that_fails_ends_those_who_wait_for_it(
        self, new_scene: NewScene, models: Models, tmp_path: Path, gate: threading.Event, expected: Callable[..., str]
    ) -> None:
        folder = Path(shutil.copytree(models.chat.path, tmp_path / "copy"))
        scene = new_scene(models.chat.model_copy(update={"path": str(folder)}))
        scene.tasks(*ALL)
        scene.start()
        for request_id in "abc":
            scene.submit(request_id, TUNED)
        scene.submit("d", DELTAS)
        slice_path(folder, TUNED).unlink()
        gate.set()
        scene.sink.wait_done(*"abc")
        assert [scene.code_of(request_id) for request_id in "abc"] == ["slice_unusable"] * 3
        assert scene.answer("d") == expected(DELTAS)
        scene.sink.wait(lambda: scene.engine.is_idle)

    def test_a_task_is_dropped_while_requests_run_with_it(
        self, new_scene: NewScene, expected: Callable[..., str]
    ) -> None:
        scene = new_scene()
        scene.tasks(TUNED, DELTAS)
        scene.start()
        scene.submit("runs", TUNED, sampling={"max_tokens": 200})
        scene.sink.wait(lambda: scene.sink.tokens.get("runs", 0) > 2)
        scene.tasks(DELTAS)
        scene.wait_told()
        scene.submit("late", TUNED)
        scene.sink.wait_done("late")
        assert scene.code_of("late") == "task_not_found"
        assert scene.answer("runs") == expected(TUNED, tokens=200)
        scene.sink.wait(lambda: scene.engine.is_idle)
        assert [task.name for task in scene.engine.models["chat"].tasks] == [DELTAS]
        assert scene.number("sixfold_slice_residency_seconds_count", TUNED) == 1, "it went with its last request"

    def test_cancelled_requests_hold_nothing(self, new_scene: NewScene, gate: threading.Event) -> None:
        """One waits for its slice, one runs: both give it back."""
        scene = new_scene()
        scene.tasks(TUNED, ADAPTERS)
        scene.start()
        scene.submit("waits", TUNED)
        scene.engine.cancel(scene.sink, ["waits"])
        gate.set()
        scene.submit("runs", TUNED, sampling={"max_tokens": 200})
        scene.sink.wait(lambda: scene.sink.tokens.get("runs", 0) > 2)
        scene.engine.cancel(scene.sink, ["runs"])
        scene.sink.wait(lambda: scene.engine.is_idle)
        scene.tasks(ADAPTERS)
        scene.wait_told()
        assert scene.resident == set()
        assert "waits" not in scene.sink.dones and "runs" not in scene.sink.dones

    def test_an_engine_that_is_loading_a_slice_stops(self, new_scene: NewScene, gate: threading.Event) -> None:
        scene = new_scene()
        scene.tasks(TUNED)
        scene.start()
        scene.submit("waits", TUNED)
        scene.submit("goes")
        scene.answer("goes")
        scene.engine.stop()
        assert not scene.engine.is_alive
        assert scene.code_of("waits") == "engine_stopped"
        gate.set()

    def test_two_engines_share_the_files(self, new_scene: NewScene, expected: Callable[..., str]) -> None:
        scenes = [new_scene(), new_scene()]
        for scene in scenes:
            scene.tasks(*ALL, cache=55_000)
            scene.start()
        for scene in scenes:
            for task in ALL:
                scene.submit(task, task)
        for scene in scenes:
            assert [scene.answer(task) for task in ALL] == [expected(task) for task in ALL]

    def test_a_model_that_transformers_computes_has_no_tasks_and_says_so(
        self, new_scene: NewScene, new_decoder: Callable[..., Path], tmp_path: Path
    ) -> None:
        scene = new_scene(ServedModel(name="chat", task=Task.GENERATION, path=str(new_decoder(tmp_path, "Mistral"))))
        scene.tasks(TUNED)
        scene.start()
        scene.submit("task", TUNED)
        scene.submit("plain")
        scene.answer("plain")
        scene.sink.wait_done("task")
        failure = scene.sink.dones["task"].failure
        assert failure is not None and (failure.status, failure.code) == (400, "tasks_unsupported")
        assert "transformers computes this model" in scene.engine.models["chat"].unsupported[Mode.SUBGRAPHS]
