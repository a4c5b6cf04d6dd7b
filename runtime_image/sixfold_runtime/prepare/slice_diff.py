"""What a checkpoint that was tuned for a task has of its own beside its trunk: feed-forward parts, and a head.

Attention, embeddings and norms are shared by all tasks of a trunk, so they must be the trunk's, to the last bit.
A feed-forward matrix that differs becomes a low-rank delta where one gives the tuned matrix back within float32
rounding (a merged LoRA, arXiv 2106.09685), else it replaces the trunk's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sixfold_api.scalars import Task
from sixfold_runtime.engine.checkpoint import TensorStore
from sixfold_runtime.engine.mlp import Modules
from sixfold_runtime.prepare.failures import PreparationError, Reason

_MODEL_PREFIXES = ("bert.", "roberta.", "distilbert.", "model.")
"""Of the trunk inside of a model with a head; a bare trunk has none."""
_TOKEN_HEADS = ("classifier.", "score.")
_HEADS = (*_TOKEN_HEADS, "pre_classifier.", "pooler.")
_OUTPUT = "lm_head.weight"
_EMBEDDINGS = "embed_tokens.weight"
_A, _B = ".delta_a", ".delta_b"
_MAX_RANK = 256
"""Adapters in use have less; looking further takes minutes a matrix."""
_ROUNDINGS = 4
"""A delta may miss each value by so many roundings of the matrix's largest one."""


@dataclass(frozen=True)
class Difference:
    """The tensors of a slice, and what they are."""

    tensors: dict[str, torch.Tensor]
    replaced: int
    """Modules."""
    deltas: dict[str, int]
    """Module -> rank."""


def core(name: str) -> str:
    """A tensor's name inside of the trunk, whether or not the model has a head."""
    prefix = next((prefix for prefix in _MODEL_PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def difference(
    trunk: TensorStore, tuned: TensorStore, layers: Sequence[tuple[Modules, Modules]], task: Task
) -> Difference:
    """What a slice of `tuned` needs over `trunk`.

    Args:
        layers: the modules of each layer's feed-forward part, by the trunk's names; those of one tuple are computed
            side by side.

    Raises PreparationError(UnusableSlice): a shared tensor differs (with its name and by how much), is missing, or is
        there in excess; or nothing differs.
    """
    parts = [part for layer in layers for part in layer]
    tuned_names = {core(name): name for name in tuned.names}
    _require_shared(trunk, tuned, {module for part in parts for module in part}, tuned_names)
    tensors: dict[str, torch.Tensor] = {}
    deltas: dict[str, int] = {}
    replaced = 0
    for part in parts:
        changed = _part(trunk, tuned, part, tuned_names)
        tensors |= changed
        deltas |= {name.removesuffix(_A): len(changed[name]) for name in changed if name.endswith(_A)}
        replaced += sum(name.endswith(".weight") for name in changed)
    heads = () if task is Task.GENERATION else _TOKEN_HEADS if task is Task.TOKEN_CLASSIFICATION else _HEADS
    tensors |= {name: tuned.get(name).clone() for key, name in tuned_names.items() if heads and key.startswith(heads)}
    if not tensors:
        raise _refused(f"{tuned.folder.name} is {trunk.folder.name}: no layer differs, so the task needs no slice")
    return Difference(tensors, replaced, deltas)


def low_rank(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """float32 a [r, in] and b [out, r] with before + b a = after within float32 rounding, of the least rank that does.

    None where no rank does that takes less than half of the matrix [out, in].
    """
    outputs, inputs = before.shape
    most = min(_MAX_RANK, (outputs * inputs - 1) // (2 * (outputs + inputs)))
    change = after.double() - before.double()
    allowed = _ROUNDINGS * torch.finfo(torch.float32).eps * float(after.abs().max())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Randomised (Halko et al., arXiv 0909.4061): a few more columns and passes make it as good as exact here.
        u, s, v = torch.svd_lowrank(change, q=min(most + 8, outputs, inputs), niter=4)

    def is_enough(rank: int) -> bool:
        return _misses(change, u, s, v, rank) <= allowed

    if most < 1 or not is_enough(most):
        return None
    rank = 1 + bisect_left(range(1, most + 1), True, key=is_enough)
    root = s[:rank].sqrt()
    return (v[:, :rank] * root).t().float().contiguous(), (u[:, :rank] * root).float().contiguous()


def _misses(change: torch.Tensor, u: torch.Tensor, s: torch.Tensor, v: torch.Tensor, rank: int) -> float:
    return float((change - (u[:, :rank] * s[:rank]) @ v[:, :rank].t()).abs().max())


def _part(
    trunk: TensorStore, tuned: TensorStore, part: Modules, tuned_names: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Of modules that are computed side by side: nothing, deltas of those that differ, or replacements of all."""
    pairs = {
        name: (trunk.get(name), tuned.get(tuned_names[core(name)]))
        for module in part
        for name in (f"{module}.weight", f"{module}.bias")
        if trunk.has(name)
    }
    changed = {name: pair for name, pair in pairs.items() if not _equal(*pair)}
    found: dict[str, torch.Tensor] = {}
    for name, (before, after) in changed.items():
        factors = low_rank(before, after) if name.endswith(".weight") else None
        if factors is None:
            return {name: after.clone() for name, (_, after) in pairs.items()}
        module = name.removesuffix(".weight")
        found[f"{module}{_A}"], found[f"{module}{_B}"] = factors
    return found


def _require_shared(trunk: TensorStore, tuned: TensorStore, modules: set[str], tuned_names: Mapping[str, str]) -> None:
    """The same model first, by names and shapes, and then by what is shared."""
    shared = [name for name in sorted(trunk.names) if not _is_own(name, trunk) and core(name) in tuned_names]
    for name in sorted(trunk.names):
        if not (_is_own(name, trunk) or core(name) in tuned_names or core(name) == _OUTPUT):
            raise _refused(f"{tuned.folder.name} lacks {name}, which {trunk.folder.name} has: it is another model")
    for name in shared:
        wanted, found = trunk.shape(name), tuned.shape(tuned_names[core(name)])
        if wanted != found:
            raise _refused(
                f"{name} has shape {list(found)} in {tuned.folder.name} and {list(wanted)} in {trunk.folder.name}: it "
                "was not tuned from this trunk"
            )
    for key in sorted(tuned_names.keys() - {core(name) for name in trunk.names}):
        _require_harmless(trunk, tuned, key, tuned_names)
    for name in shared:
        before, after = trunk.get(name), tuned.get(tuned_names[core(name)])
        if name.rpartition(".")[0] not in modules and not _equal(before, after):
            raise _refused(
                f"{name} differs from the trunk's by up to {float((after.float() - before.float()).abs().max()):.3g}: "
                "attention, embeddings and norms are shared by all tasks and must be the trunk's. Freeze them when you "
                "tune for the task, or train an adapter over the trunk (`sixfold prepare slice train`)"
            )


def _is_own(name: str, trunk: TensorStore) -> bool:
    """Whether a tensor of the trunk's folder is its head, or a table of positions: no part of what is shared."""
    return core(name).startswith(_HEADS) or not trunk.get(name).is_floating_point()


def _require_harmless(trunk: TensorStore, tuned: TensorStore, key: str, tuned_names: Mapping[str, str]) -> None:
    """A tensor that the trunk hasn't: a head, a table of positions, or the tied embeddings once more."""
    name = tuned_names[key]
    tensor = tuned.get(name)
    if key.startswith(_HEADS) or not tensor.is_floating_point():
        return
    tied = next((other for other in trunk.names if core(other) == _EMBEDDINGS), None)
    if key == _OUTPUT and tied is not None and _equal(trunk.get(tied), tensor):
        return
    raise _refused(f"{tuned.folder.name} has {name}, which {trunk.folder.name} hasn't: it is another model")


def _equal(before: torch.Tensor, after: torch.Tensor) -> bool:
    """In value, whichever types they are stored in."""
    return before.shape == after.shape and bool((before.float() == after.float()).all())


def _refused(problem: str) -> PreparationError:
    return PreparationError(Reason.UNUSABLE_SLICE, problem)
