"""Slices belong to a model's files: digested, verified, copied with the weights that they are for, and no weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from slice_models import LABELS, Adapters, add_slice, retuned, save_model

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.prepare.artifact import copy_beside_weights, copy_model
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import files_in, model_files, weight_files
from sixfold_runtime.prepare.slice_trunk import SliceTrunk
from sixfold_runtime.prepare.verify import Verified
from sixfold_runtime.prepare.verify import verify as verify_files

SLICE = "slices/triage.safetensors"


def verify(folder: Path, task: Task = Task.GENERATION, *, bare: bool = False) -> Verified:
    return verify_files(folder, folder.parent, task, {}, print, bare=bare)


@pytest.fixture
def with_slice(generating: SliceTrunk) -> SliceTrunk:
    add_slice(generating, "triage", Adapters(range(3)).tensors)
    return generating


def test_they_are_files_of_the_model_and_no_weights(with_slice: SliceTrunk) -> None:
    folder = with_slice.folder
    (folder / "slices" / ".triage.safetensors.partial").write_bytes(b"")
    (folder / "slices" / "Notes.txt").write_text("")
    names = files_in(folder, folder)
    assert [name for name in names if "/" in name] == [SLICE]
    assert list(weight_files(folder, names)) == ["model.safetensors"]
    assert not any(name.startswith("adapters.") for name in TensorStore(folder).names)
    listed = ["model.safetensors", "exits.safetensors", SLICE, "slices/../x.safetensors", "onnx/model.safetensors"]
    assert model_files(listed) == ["exits.safetensors", "model.safetensors", SLICE]


def test_the_digest_covers_them_and_the_size_of_weights_does_not(
    with_slice: SliceTrunk, generator: Path, own: Callable[[Path], Path]
) -> None:
    before, after = verify(generator), verify(with_slice.folder)
    assert after.files.keys() - before.files.keys() == {SLICE}
    assert after.facts.digest != before.facts.digest and after.facts.size_bytes == before.facts.size_bytes
    assert after.unused_tensors == before.unused_tensors


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def changed(path: Path) -> None:
    retuned(path.parent.parent, path.parent.parent / "other", lambda name, tensor: tensor * 1.01)
    (path.parent.parent / "other" / "model.safetensors").rename(path.parent.parent / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "reason", "problem"),
    [
        (damaged, Reason.CORRUPT_WEIGHTS, "is cut off"),
        (changed, Reason.UNUSABLE_SLICE, "made for other weights"),
    ],
)
def test_one_that_can_not_be_served_is_refused(
    with_slice: SliceTrunk, change: Callable[[Path], None], reason: Reason, problem: str
) -> None:
    change(with_slice.folder / SLICE)
    with pytest.raises(PreparationError, match=problem) as raised:
        verify(with_slice.folder)
    assert raised.value.reason is reason and "triage.safetensors" in str(raised.value)


def test_values_that_are_none_are_refused(generating: SliceTrunk) -> None:
    tensors = Adapters(range(3)).tensors
    tensors["adapters.2.up.bias"][0] = float("inf")
    add_slice(generating, "triage", tensors)
    with pytest.raises(PreparationError, match=r"adapters\.2\.up\.bias holds NaN or infinite") as raised:
        verify(generating.folder)
    assert raised.value.reason is Reason.NON_FINITE_WEIGHTS


def test_a_link_out_of_the_claim_is_refused(with_slice: SliceTrunk, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "triage.safetensors"
    (with_slice.folder / SLICE).rename(outside)
    (with_slice.folder / SLICE).symlink_to(outside)
    with pytest.raises(PreparationError, match="leads out of the claim"):
        verify(with_slice.folder)


def test_copies_have_them_where_the_weights_stay_the_same(with_slice: SliceTrunk, tmp_path: Path) -> None:
    beside, whole = tmp_path / "beside", tmp_path / "whole"
    beside.mkdir()
    copy_beside_weights(with_slice.folder, beside)
    assert sorted(path.name for path in beside.iterdir()) == [
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    copy_model(with_slice.folder, whole)
    assert verify(whole).files == verify(with_slice.folder).files
    assert (whole / SLICE).samefile(with_slice.folder / SLICE)
    assert not (whole / "config.json").samefile(with_slice.folder / "config.json")


def test_token_classifiers_and_bare_trunks(tmp_path: Path) -> None:
    words = save_model(tmp_path / "words", "Bert", "ForTokenClassification")
    assert verify(words, Task.TOKEN_CLASSIFICATION).facts.labels == list(LABELS.values())
    with pytest.raises(PreparationError, match="needs a sequence classifier"):
        verify(words, Task.CLASSIFICATION)
    bare = save_model(tmp_path / "bare", "Bert", "Model")
    assert verify(bare, Task.CLASSIFICATION, bare=True).facts.labels == []
    with pytest.raises(PreparationError, match="describes BertModel"):
        verify(bare, Task.CLASSIFICATION)
