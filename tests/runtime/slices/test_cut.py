"""Slices cut out of tuned checkpoints: logits stay the same, and what isn't a slice is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from slice_models import LABELS, LAYERS, add_slice, is_ffn, is_head, noise, retuned, save_model

from sixfold_api.scalars import Task
from sixfold_runtime.engine.loader import LoadedModel
from sixfold_runtime.engine.slice_file import slice_info, slice_path
from sixfold_runtime.engine.task_slice import TaskSlice
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.slice_cut import TOLERANCE, cut
from sixfold_runtime.prepare.slice_trunk import SliceTrunk, label_logits, open_model, open_trunk, token_logits

CPU = torch.device("cpu")
TEXTS = [[5, 9, 11, 4], [7], [3, 3, 8, 20, 21, 22, 23, 24, 25]]


def layer_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def tuned(source: Path, target: Path, changed: dict[int, str], seed: int = 1) -> Path:
    """FFN layers changed by a low-rank update or wholly, and another head."""

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if is_head(name):
            return tensor + 0.3 * noise(tensor, seed)
        if not is_ffn(name) or (how := changed.get(layer_of(name))) is None:
            return tensor
        if how == "whole" or tensor.ndim == 1:
            return tensor + 0.1 * noise(tensor, seed) if how == "whole" else tensor
        out, width = tensor.shape
        return tensor + 0.1 * noise(torch.empty(out, 2), seed) @ noise(torch.empty(2, width), seed + 1)

    return retuned(source, target, change)


def logits(model: LoadedModel, task: Task, task_slice: TaskSlice | None) -> list[torch.Tensor]:
    of = token_logits if task is Task.GENERATION else label_logits
    return list(of(model, TEXTS, task_slice))


def require_equal(trunk: SliceTrunk, checkpoint: Path, path: Path) -> None:
    task_slice = trunk.load(path)
    whole = logits(open_model(checkpoint, CPU), task_slice.task, None)
    for ours, theirs in zip(logits(trunk.model, task_slice.task, task_slice), whole, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE * max(1.0, float(theirs.abs().max())))
    if task_slice.task is Task.GENERATION:
        assert not torch.allclose(ours, logits(trunk.model, task_slice.task, None)[-1], atol=1e-3)


CHANGES = st.dictionaries(st.integers(0, LAYERS - 1), st.sampled_from(["low-rank", "whole"]), min_size=1)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=CHANGES, seed=st.integers(0, 100))
def test_any_layers_changed_in_any_way(
    generator: Path, tmp_path_factory: pytest.TempPathFactory, changed: dict[int, str], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    trunk = open_trunk(Path(shutil.copytree(generator, folder / "chat")), CPU)
    checkpoint = tuned(generator, folder / "tuned", changed, seed)
    path = slice_path(trunk.folder, "triage")
    cut(trunk, checkpoint, path, print)
    names = load_file(path).keys()
    assert {layer_of(name) for name in names} == set(changed)  # layers that are the trunk's cost nothing
    for layer, how in changed.items():
        ends = {name.rpartition(".")[2] for name in names if layer_of(name) == layer}
        assert ends == ({"weight"} if how == "whole" else {"delta_a", "delta_b"})
    require_equal(trunk, checkpoint, path)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_other_generators(kind: str, tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "chat", kind, "ForCausalLM", tie_word_embeddings=True)
    checkpoint = tuned(trunk, tmp_path / "tuned", {0: "low-rank", 2: "whole"})
    path = slice_path(trunk, "triage")
    cut(trunk, checkpoint, path, print)
    require_equal(open_trunk(trunk, CPU), checkpoint, path)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForTokenClassification"])
def test_classifiers_with_their_heads(kind: str, suffix: str, tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "trunk", kind, "ForSequenceClassification")
    base = save_model(tmp_path / "base", kind, suffix) if suffix == "ForTokenClassification" else trunk
    base = with_trunk_of(trunk, base, tmp_path / "aligned")
    checkpoint = tuned(base, tmp_path / "tuned", {0: "low-rank", 2: "whole"})
    path = slice_path(trunk, "intent")
    report = cut(trunk, checkpoint, path, print)
    assert report.task.value == suffix.removeprefix("For").replace("Sequence", "")
    assert slice_info(path).labels == tuple(LABELS.values())
    require_equal(open_trunk(trunk, CPU), checkpoint, path)


def with_trunk_of(trunk: Path, base: Path, target: Path) -> Path:
    """`base` with the shared tensors of `trunk`."""
    shared = load_file(trunk / "model.safetensors")
    return retuned(base, target, lambda name, tensor: tensor if is_head(name) else shared[name])


def test_a_bare_trunk(tmp_path: Path) -> None:
    trunk = save_model(tmp_path / "trunk", "Bert", "Model")
    shared = load_file(trunk / "model.safetensors")
    whole = save_model(tmp_path / "whole", "Bert", "ForSequenceClassification")
    aligned = retuned(whole, tmp_path / "aligned", lambda name, tensor: shared.get(name.removeprefix("bert."), tensor))
    checkpoint = tuned(aligned, tmp_path / "tuned", {1: "whole"})
    path = slice_path(trunk, "intent")
    cut(trunk, checkpoint, path, print)
    require_equal(open_trunk(trunk, CPU), checkpoint, path)


def refusal(trunk: Path, checkpoint: Path, task: Task | None = None) -> str:
    path = slice_path(trunk, "triage")
    with pytest.raises(PreparationError) as raised:
        cut(trunk, checkpoint, path, print, task)
    assert raised.value.reason is Reason.UNUSABLE_SLICE
    assert not path.exists() and not list(trunk.glob("slices/.*"))
    return str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ],
)
def test_shared_parts_must_be_the_trunks(name: str, generator: Path, tmp_path: Path) -> None:
    trunk = Path(shutil.copytree(generator, tmp_path / "chat"))
    checkpoint = retuned(trunk, tmp_path / "tuned", lambda n, tensor: tensor + 0.25 if n == name else tensor)
    message = refusal(trunk, checkpoint)
    assert name in message and "0.25" in message and "shared by all tasks" in message


def test_what_is_no_slice_is_refused(generator: Path, classifier: Path, tmp_path: Path) -> None:
    trunk = Path(shutil.copytree(generator, tmp_path / "chat"))
    assert "no layer differs" in refusal(trunk, generator)
    smaller = save_model(tmp_path / "smaller", "Llama", "ForCausalLM", intermediate_size=40)
    assert "has shape" in refusal(trunk, smaller)
    shallower = save_model(tmp_path / "shallower", "Llama", "ForCausalLM", num_hidden_layers=2)
    assert "lacks" in refusal(trunk, shallower)
    deeper = save_model(tmp_path / "deeper", "Llama", "ForCausalLM", num_hidden_layers=4)
    assert "hasn't" in refusal(trunk, with_trunk_of_deeper(trunk, deeper, tmp_path / "deeper2"))
    checkpoint = tuned(trunk, tmp_path / "tuned", {0: "whole"})
    assert "is a model for Generation" in refusal(trunk, checkpoint, Task.CLASSIFICATION)
    assert "can't have a slice for Classification" in refusal(trunk, classifier)


def with_trunk_of_deeper(trunk: Path, base: Path, target: Path) -> Path:
    shared = load_file(trunk / "model.safetensors")
    return retuned(base, target, lambda name, tensor: shared.get(name, tensor))


def test_quantised_trunks_are_no_source_of_differences(generator: Path, tmp_path: Path) -> None:
    trunk = Path(shutil.copytree(generator, tmp_path / "chat"))
    config = trunk / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "sixfold-int8"},', 1))
    assert "is quantised" in refusal(trunk, generator)


def test_an_older_slice_stays_when_a_new_one_is_refused(generating: SliceTrunk, generator: Path) -> None:
    path = add_slice(generating, "triage", {"adapters.0.down.bias": torch.zeros(1)})
    before = path.read_bytes()
    with pytest.raises(PreparationError):
        cut(generating, generator, path, print)
    assert path.read_bytes() == before
