"""A slice's file: what is refused, and that it is mapped and not copied."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from slice_models import FFN, WIDTH, Adapters, add_slice, retuned

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.errors import ModelLoadError
from sixfold_runtime.engine.fingerprint import trunk_fingerprint
from sixfold_runtime.engine.forward import make_forward
from sixfold_runtime.engine.slice_file import slice_info
from sixfold_runtime.engine.task_slice import TaskSlice, load_slice
from sixfold_runtime.prepare.slice_trunk import SliceTrunk

GATE, UP, DOWN = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))


def load(trunk: SliceTrunk, path: Path) -> TaskSlice:
    return load_slice(path, trunk.host, trunk.fingerprint, trunk.model.dtype, trunk.model.device)


def mapped_bytes(path: Path) -> int:
    """Resident bytes of this process's mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_header_alone(generating: SliceTrunk) -> None:
    tensors = Adapters(range(1, 3)).tensors
    info = slice_info(add_slice(generating, "triage", tensors))
    assert (info.name, info.task, info.labels, info.trunk) == (
        "triage", Task.GENERATION, (), generating.fingerprint,
    )  # fmt: skip
    assert info.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_slice_computes_what_its_tensors_say(generating: SliceTrunk) -> None:
    tensors = Adapters(range(2, 3)).tensors
    task_slice = load(generating, add_slice(generating, "triage", tensors))
    assert list(task_slice.layers) == [2] and task_slice.layers[2].mlp is None and task_slice.head is None
    z = torch.randn(5, WIDTH)
    down, up = ((tensors[f"adapters.2.{side}.weight"], tensors[f"adapters.2.{side}.bias"]) for side in ("down", "up"))
    expected = z + torch.nn.functional.gelu(z @ down[0].t() + down[1]) @ up[0].t() + up[1]
    adapter = task_slice.layers[2].adapter
    assert adapter is not None and torch.allclose(adapter(z.clone()), expected, atol=1e-5)
    assert task_slice.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_forwards_with_it_differ_from_those_without(generating: SliceTrunk) -> None:
    task_slice = load(generating, add_slice(generating, "triage", Adapters(range(3)).tensors))
    forward = make_forward(generating.model)
    alone, both = ([5, 6, 7],), ([5, 6, 7], [5, 6, 7])
    plain = forward(alone, forward.new_cache(1))
    mixed = forward(both, forward.new_cache(2), slices=[task_slice, None])
    assert torch.allclose(mixed[1], plain[0], atol=1e-5)
    assert not torch.allclose(mixed[0], plain[0], atol=1e-2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps, which only Linux has")
def test_it_is_mapped_touched_and_unmapped_with_the_last_reference(generating: SliceTrunk) -> None:
    path = add_slice(generating, "large", Adapters(range(3), bottleneck=2048).tensors)
    size = path.stat().st_size
    task_slice = load(generating, path)
    assert mapped_bytes(path) > 0.99 * size  # all of it, and only once
    assert mapped_bytes(path) < 1.01 * size + 8192
    other = load(generating, path)
    del task_slice
    gc.collect()
    assert mapped_bytes(path) > 0.99 * size
    del other
    gc.collect()
    assert mapped_bytes(path) == 0


def test_another_float_type_is_converted_and_counted_so(generating: SliceTrunk) -> None:
    tensors = Adapters(range(3)).tensors
    path = add_slice(generating, "half", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert slice_info(path).size_bytes * 2 == load(generating, path).size_bytes
    gc.collect()
    assert mapped_bytes(path) == 0  # nothing refers to the map any more


def with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors["adapters.1.up.weight"][3, 1] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_nan, "adapters.1.up.weight holds NaN"),
        (
            lambda t: t | {"adapters.1.up.weight": torch.full((WIDTH, 4), float("inf"))},
            "adapters.1.up.weight holds NaN",
        ),
        (lambda t: t | {"adapters.1.up.weight": torch.zeros(WIDTH, 5)}, r"adapters.1.up.weight has shape \[32, 5\]"),
        (lambda t: {name: v for name, v in t.items() if name != "adapters.1.up.bias"}, "adapters.1.up.bias is missing"),
        (lambda t: t | {"adapters.3.up.bias": torch.zeros(WIDTH)}, "adapters.3.up.bias belongs to no"),
        (lambda t: t | {"model.norm.weight": torch.zeros(WIDTH)}, "model.norm.weight belongs to no"),
        (lambda t: t | {DOWN: torch.zeros(WIDTH, FFN + 1)}, "down_proj.weight has shape"),
        (lambda t: t | {GATE: torch.zeros(FFN, WIDTH)}, "gate_proj but not .*up_proj"),
        (lambda t: t | {"adapters.1.up.weight": torch.zeros(WIDTH, 4).int()}, "is of type I32"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    generating: SliceTrunk, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], problem: str
) -> None:
    path = add_slice(generating, "triage", change(Adapters(range(1, 2)).tensors))
    with pytest.raises(ModelLoadError, match=problem) as raised:
        load(generating, path)
    assert str(path) in str(raised.value) and "anew" in str(raised.value)


def test_values_whose_sum_overflows_are_finite(generating: SliceTrunk) -> None:
    tensors = Adapters(range(1)).tensors
    tensors["adapters.0.down.weight"] = torch.full((4, WIDTH), 3e38)
    assert load(generating, add_slice(generating, "large", tensors)).layers


def test_damaged_files_are_refused(generating: SliceTrunk) -> None:
    path = add_slice(generating, "triage", Adapters(range(3)).tensors)
    whole = path.read_bytes()
    for content, problem in (
        (whole[:-100], "damaged"),
        (whole[:20], "damaged"),
        (b"", "damaged"),
        (b"\xff" * 200, "damaged"),
        (whole.replace(b"sixfold-slice/1", b"sixfold-slice/9"), "is no task slice"),
        (whole.replace(b'"labels"', b'"lapels"'), "says not what it is for"),
    ):
        path.write_bytes(content)
        for read in (slice_info, lambda path: load(generating, path)):
            with pytest.raises(ModelLoadError, match=problem):
                read(path)
    path.unlink()
    with pytest.raises(ModelLoadError, match="is missing"):
        slice_info(path)


def test_labels_that_do_not_fit_the_task_are_refused(generating: SliceTrunk) -> None:
    path = add_slice(generating, "triage", Adapters(range(3)).tensors, labels=("a", "b"))
    with pytest.raises(ModelLoadError, match="2 labels don't fit the task Generation"):
        load(generating, path)


def test_a_slice_of_another_trunk_is_refused(generating: SliceTrunk, tmp_path: Path) -> None:
    path = add_slice(generating, "triage", Adapters(range(3)).tensors)
    other = retuned(generating.folder, tmp_path / "other", lambda name, tensor: tensor * 1.001)
    with pytest.raises(ModelLoadError, match="made for other weights"):
        load_slice(path, generating.host, trunk_fingerprint(TensorStore(other)), torch.float32, torch.device("cpu"))


def test_fingerprints_tell_weights_apart_and_not_what_lies_beside_them(generating: SliceTrunk, tmp_path: Path) -> None:
    def of(change: Callable[[str, torch.Tensor], torch.Tensor], name: str) -> str:
        return trunk_fingerprint(TensorStore(retuned(generating.folder, tmp_path / name, change)))

    add_slice(generating, "triage", Adapters(range(3)).tensors)
    assert of(lambda _, tensor: tensor, "same") == generating.fingerprint
    changed = {
        of(lambda name, tensor: tensor if name != GATE else tensor * 1.01, "scaled"),
        of(lambda name, tensor: tensor.bfloat16(), "half"),
        of(lambda name, tensor: tensor.t() if name == GATE else tensor, "turned"),
    }
    assert len(changed | {generating.fingerprint}) == 4
