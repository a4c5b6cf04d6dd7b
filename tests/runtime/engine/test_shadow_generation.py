"""Generated answers computed again at level 0: what is counted is what transformers computes offline."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sixfold_api.effective import effective
from sixfold_api.generation import Acceptance, GenerationSpec, Guard, QuantizedSpec, SpeculativeSpec
from sixfold_api.pods import VariantRef
from sixfold_api.policy import InferencePolicySpec
from sixfold_api.runtime_config import (
    CANARY,
    CanaryConfig,
    Draft,
    EffectiveConfig,
    RuntimeConfig,
    ServedModel,
    ShadowConfig,
    WeightSet,
)
from sixfold_api.scalars import FullWeights, Task
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.loader import load
from sixfold_runtime.engine.metrics import EngineMetrics
from sixfold_runtime.engine.protocol import Generate, Sampling
from sixfold_runtime.engine.scheduler import Limits
from sixfold_runtime.engine.shadow import Shadows
from sixfold_runtime.engine.weight_loader import Place
from sixfold_runtime.engine.weight_sets import WeightSets
from sixfold_runtime.prepare.quantised import INT8_METHOD
from sixfold_runtime.settings import RuntimeSettings

CPU = torch.device("cpu")
PROMPTS = [torch.randint(2, 320, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (1, 3, 9, 30)]
TOKENS = 20


def at(level: int, quantized: bool = True, rate: float = 1.0) -> EffectiveConfig:
    """Quantised weights from level 1, a draft from level 2."""
    generation = GenerationSpec(
        variant_ref=VariantRef(name="chat"),
        quantized=QuantizedSpec(variant_ref=VariantRef(name="chat-int4")) if quantized else None,
        speculative=SpeculativeSpec(draft_variant_ref=VariantRef(name="chat-draft")),
    )
    config = effective(InferencePolicySpec(generation=generation), level).config
    return config.model_copy(update={"shadow": ShadowConfig(sample_rate=rate)})


def noisy(folder: Path, target: Path, noise: float) -> Path:
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    dice = torch.Generator().manual_seed(1)
    changed = {name: value + noise * torch.randn(value.shape, generator=dice) for name, value in weights.items()}
    save_file({**changed, "lm_head.weight": weights["lm_head.weight"]}, target / "model.safetensors", {"format": "pt"})
    return target


def rounded(folder: Path, target: Path) -> Path:
    """INT8: each linear rounded by output channel."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1) / 127
        tensors |= {name: (weight / scale[:, None]).round().to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": INT8_METHOD}}))
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        "full": decoder_folder,
        "same": Path(shutil.copytree(decoder_folder, root / "same")),
        "near": noisy(decoder_folder, root / "near", 0.01),
        "far": noisy(decoder_folder, root / "far", 0.2),
        "int8": rounded(decoder_folder, root / "int8"),
    }


@dataclass
class Scene:
    """A model's weight sets and their comparisons, stepped by hand."""

    folders: dict[str, Path]
    sink: Any
    config: RuntimeConfig = field(default_factory=lambda: RuntimeConfig(sequence=1, stable=at(1)))
    metrics: EngineMetrics = field(default_factory=lambda: EngineMetrics(RuntimeSettings()))
    shadows: Shadows = field(default_factory=Shadows)
    available_bytes: int = 2**32
    answers: dict[str, list[int]] = field(default_factory=dict)
    sets: WeightSets = field(init=False)

    def start(
        self,
        quantized: str = "",
        draft: str = "",
        full_weights: FullWeights = FullWeights.RESIDENT,
        **limits: Any,
    ) -> WeightSets:
        served = ServedModel(
            name="chat",
            task=Task.GENERATION,
            path=str(self.folders["full"]),
            quantized=WeightSet(name="chat-int4", path=str(self.folders[quantized])) if quantized else None,
            full_weights=full_weights,
            draft=Draft(name="chat-draft", path=str(self.folders[draft])) if draft else None,
        )
        place = Place(CPU, Limits(**limits), 0.5, lambda _: self.available_bytes)
        self.sets = WeightSets(served, place, lambda: self.config, self.metrics, shadows=self.shadows)
        return self.sets

    def configure(self, stable: EffectiveConfig, canary: EffectiveConfig | None = None) -> None:
        split = None if canary is None else CanaryConfig(percent=50, config=canary)
        self.config = RuntimeConfig(sequence=1, stable=stable, canary=split)
        self.sets.adapt()

    def ask(self, arm: str = "stable", **sampling: Any) -> None:
        """All prompts, one answer each; `answers` gets their tokens."""
        settings = Sampling(**{"max_tokens": TOKENS, "temperature": 0.0, **sampling})
        for index, prompt in enumerate(PROMPTS):
            name = f"{arm}{len(self.answers)}-{index}"
            request = Generate(name, "chat", prompt, settings, arm=arm)
            self.sets.submit((self.sink, name), request)
        while self.sets.can_step:
            sequences = [s for held in self.sets._sets for s in held.runner._sequences]
            self.sink.take(self.sets.step())
            self.sets.adapt()
            for sequence in sequences:
                self.answers[sequence.request.id] = sequence.context[len(sequence.request.token_ids) :]

    def compare(self) -> int:
        """Compute all that is to be computed again; in how many pieces."""
        pieces = 0
        while len(self.shadows):
            self.shadows.advance()
            pieces += 1
        return pieces

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"{name}_total", {**self.metrics.labels, **labels}) or 0.0

    def results(self, variant: str, level: int = 1, arm: str = "stable") -> dict[str, tuple[float, float]]:
        """Answers and tokens by result."""
        at = {"variant": variant, "level": str(level), "arm": arm}
        return {
            result: (
                self.value("sixfold_shadow", **at, task="Generation", result=result),
                self.value("sixfold_shadow_tokens", **at, result=result),
            )
            for result in ("agree", "differ")
        }

    def kl_nats(self, variant: str, level: int = 1, arm: str = "stable") -> float:
        return self.value("sixfold_shadow_kl_nats", variant=variant, level=str(level), arm=arm)


@pytest.fixture
def scene(folders: dict[str, Path], collector: Any) -> Scene:
    return Scene(folders, collector)


@pytest.fixture(scope="module")
def offline(folders: dict[str, Path]) -> Callable[[str, list[int], list[int]], torch.Tensor]:
    """Logits [answer, vocabulary] of a set of weights, in one forward: of transformers, which doesn't know our INT8."""
    import transformers

    modules: dict[str, Any] = {}

    @torch.inference_mode()
    def compute(name: str, prompt: list[int], answer: list[int]) -> torch.Tensor:
        if name == "int8":
            forward = make_forward(load(ServedModel(name=name, task=Task.GENERATION, path=str(folders[name])), CPU))
            tokens = [prompt + answer[:-1]]
            return forward(tokens, forward.new_cache(1), every_position=True)[0, len(prompt) - 1 :].double()
        if name not in modules:
            module: Any = transformers.AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
            modules[name] = module.eval()
        logits: torch.Tensor = modules[name](torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        return logits.double()

    return compute


def pairs(scene: Scene) -> list[tuple[list[int], list[int]]]:
    return [(PROMPTS[int(name.rsplit("-", 1)[1])], answer) for name, answer in scene.answers.items()]


def test_identical_weights_agree_in_everything(scene: Scene) -> None:
    scene.start("same")
    scene.ask()
    assert len(scene.shadows) == len(PROMPTS)
    scene.compare()
    tokens = sum(map(len, scene.answers.values()))
    assert scene.results("chat-int4") == {"agree": (len(PROMPTS), tokens), "differ": (0, 0)}
    assert scene.kl_nats("chat-int4") == pytest.approx(0, abs=1e-6 * tokens)
    assert scene.value("sixfold_shadow_seconds", variant="chat-int4") > 0


@pytest.mark.parametrize("quantized", ["near", "far", "int8"])
@pytest.mark.parametrize("prefill_tokens", [256, 5])
def test_other_weights_are_compared_as_offline(scene: Scene, offline: Any, quantized: str, prefill_tokens: int) -> None:
    scene.start(quantized, prefill_tokens=prefill_tokens)
    scene.ask()
    scene.compare()
    agree = differ = same = 0
    kl_nats = 0.0
    for prompt, answer in pairs(scene):
        full, served = offline("full", prompt, answer), offline(quantized, prompt, answer)
        equal = full.argmax(-1) == served.argmax(-1)
        agree, differ = agree + int(equal.sum()), differ + int((~equal).sum())
        same += full.argmax(-1).tolist() == answer
        first, second = full.log_softmax(-1), served.log_softmax(-1)
        kl_nats += float((first.exp() * (first - second)).sum())
    assert scene.results("chat-int4") == {"agree": (same, agree), "differ": (len(PROMPTS) - same, differ)}
    assert scene.kl_nats("chat-int4") / (agree + differ) == pytest.approx(kl_nats / (agree + differ), abs=1e-4)
    assert kl_nats > 0


def test_drawn_answers_are_compared_where_the_weights_are_others(scene: Scene, offline: Any) -> None:
    scene.start("near")
    scene.ask(temperature=1.0, seed=3)
    scene.compare()
    same = 0
    for prompt, answer in pairs(scene):
        same += bool((offline("full", prompt, answer).argmax(-1) == offline("near", prompt, answer).argmax(-1)).all())
    results = scene.results("chat-int4")
    assert (results["agree"][0], results["differ"][0]) == (same, len(PROMPTS) - same)
    assert results["agree"][1] + results["differ"][1] == sum(map(len, scene.answers.values()))


def test_on_the_same_weights_lossless_speculation_agrees(scene: Scene) -> None:
    scene.start(draft="near")
    scene.configure(at(2, quantized=False))
    scene.ask()
    assert any(done.drafted_tokens for done in scene.sink.dones.values())
    scene.compare()
    tokens = sum(map(len, scene.answers.values()))
    assert scene.results("chat", 2) == {"agree": (len(PROMPTS), tokens), "differ": (0, 0)}
    assert scene.kl_nats("chat", 2) == 0


def test_what_speculation_loses_is_seen(scene: Scene, offline: Any) -> None:
    """By the rule Threshold a draft's tokens stay that aren't the target's likeliest."""
    lossy = at(2, quantized=False)
    assert lossy.speculative is not None
    rule = lossy.speculative.model_copy(
        update={"acceptance": Acceptance.THRESHOLD, "min_probability": 0.0, "guard": Guard.SINGLE_TOKEN}
    )
    scene.start(draft="far")
    scene.configure(lossy.model_copy(update={"speculative": rule}))
    scene.ask()
    scene.compare()
    same, tokens = 0, [0, 0]
    for prompt, answer in pairs(scene):
        chosen = offline("full", prompt, answer).argmax(-1).tolist()
        same += chosen == answer
        for choice, token in zip(chosen, answer, strict=True):
            tokens[choice == token] += 1
    assert tokens[0] > 0
    assert scene.results("chat", 2) == {"agree": (same, tokens[1]), "differ": (len(PROMPTS) - same, tokens[0])}


def test_penalties_are_part_of_what_level_0_picks(scene: Scene) -> None:
    scene.start(draft="near")
    scene.configure(at(2, quantized=False))
    scene.ask(repetition_penalty=1.5, frequency_penalty=0.5)
    scene.compare()
    assert scene.results("chat", 2)["agree"][0] == len(PROMPTS)


def test_nothing_is_compared_that_could_not_differ(scene: Scene) -> None:
    """Level 0 with itself, and draws on the same weights, which differ from the likeliest tokens anyway."""
    scene.start("near", draft="near")
    scene.configure(at(0))
    scene.ask()
    scene.configure(at(2, quantized=False))
    scene.ask(temperature=1.0)
    scene.configure(at(1, rate=0.0))
    scene.ask()
    assert len(scene.shadows) == 0


def test_arms_are_counted_apart(scene: Scene) -> None:
    """Each by its own share: of the stable arm nothing is compared here."""
    scene.start("near")
    scene.configure(at(0), at(1))
    scene.ask()
    scene.ask(CANARY)
    scene.compare()
    results = scene.results("chat-int4", 1, CANARY)
    assert results["agree"][0] + results["differ"][0] == len(PROMPTS)
    assert scene.results("chat", 0) == {"agree": (0, 0), "differ": (0, 0)}


def test_pieces_are_no_longer_than_a_prefill(scene: Scene) -> None:
    """One for each set of weights and each 4 tokens of prompt or answer."""
    scene.start("near", prefill_tokens=4)
    scene.ask()
    pieces = sum(2 * (-(-(len(prompt) - 1) // 4) + -(-len(answer) // 4)) for prompt, answer in pairs(scene))
    assert scene.compare() == pieces


def test_with_swap_nothing_is_compared_and_the_pod_says_so(scene: Scene) -> None:
    sets = scene.start("near", full_weights=FullWeights.SWAP)
    scene.ask()
    assert len(scene.shadows) == 0
    assert "full weights" in sets.shadow_off and "Swap" in sets.shadow_off
    scene.configure(at(1, rate=0.0))
    assert sets.shadow_off == "", "nothing was asked for"


def test_resident_weights_are_compared_and_nothing_is_off(scene: Scene) -> None:
    assert scene.start("near").shadow_off == ""


def test_one_that_needs_too_much_memory_is_skipped(scene: Scene) -> None:
    """384 bytes a token: a 16th of what two sets of KV caches may take holds the shorter ones."""
    scene.available_bytes = 3 * 384 * 16 * 50
    scene.start("same")
    scene.ask(max_tokens=30)
    scene.compare()
    skipped = scene.value(
        "sixfold_shadow", variant="chat-int4", task="Generation", level="1", arm="stable", result="skipped"
    )
    fits = sum(384 * (len(p) + len(a)) <= scene.available_bytes // 2 // 2 // 16 for p, a in pairs(scene))
    assert 0 < fits < len(PROMPTS)
    assert (scene.results("chat-int4")["agree"][0], skipped) == (fits, len(PROMPTS) - fits)
