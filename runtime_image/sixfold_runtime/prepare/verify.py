"""A folder -> facts about the model in it, or the reason why it can't be served. Nothing in the folder is trusted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from sixfold_api.scalars import Task
from sixfold_api.variant import ArtifactFacts
from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import (
    ADAPTER,
    CONFIG,
    SLICES,
    adapter_files,
    files_in,
    is_made,
    read_config,
    weight_files,
)
from sixfold_runtime.prepare.layers import LinearShape, linear_shapes
from sixfold_runtime.prepare.quantised import full_tensors, scheme_of
from sixfold_runtime.prepare.tokenizer import TokenizerFacts, read_tokenizer, require_fit
from sixfold_runtime.prepare.weights import TensorEntry, WeightFile, read_header, read_values

_MAX_LABELS = 256
_MAX_LABEL_CHARACTERS = 63
_POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


@dataclass(frozen=True)
class Verified:
    """A model that can be served.

    Attributes:
        facts: what the status shows.
        files: file name -> SHA-256, of the files that the digest is made of.
        unused_tensors: names that the checkpoint holds and the model doesn't read.
        linears: what could be quantised, by name.
    """

    facts: ArtifactFacts
    files: dict[str, str]
    unused_tensors: list[str]
    linears: dict[str, LinearShape]


def verify(
    folder: Path,
    root: Path,
    task: Task,
    expected_digests: Mapping[str, str],
    log: Callable[[str], None],
    *,
    bare: bool = False,
) -> Verified:
    """Check the model in `folder` of a claim mounted at `root`.

    What is cheap comes first: small files and headers, then the seconds of importing torch and transformers, then the
    weights' bytes, at last whether task slices fit the weights.

    Args:
        expected_digests: SHA-256 sums that a hub gave.
        bare: a trunk without a head will do: task slices bring heads.

    Raises PreparationError.
    """
    names = files_in(folder, root)
    content = read_config(folder)
    architecture, scheme = content["architectures"][0], scheme_of(content)
    promised = weight_files(folder, names)
    weights = {name: read_header(folder / name) for name in promised}
    stored = _tensors(weights, promised)
    tensors = full_tensors(stored, scheme)
    tokenizer = read_tokenizer(folder)
    from sixfold_runtime.prepare.architecture import instantiate, load_config

    config = load_config(folder, architecture, task, bare=bare)
    model, unused = instantiate(config, tensors, task)
    require_fit(tokenizer, folder, model.get_input_embeddings().weight.shape[0], config)
    context_tokens = _context_tokens(config, model, tokenizer)
    has_head = task is not Task.GENERATION and not architecture.endswith("Model")
    labels = _labels(config) if has_head else []
    files = _digests(folder, [*names, *adapter_files(folder, root)], weights, log)
    _require_digests(files, expected_digests)
    if any(name.startswith(f"{SLICES}/") for name in files):
        from sixfold_runtime.prepare import slices

        slices.verify(folder)
    facts = ArtifactFacts(
        digest=_digest(files),
        size_bytes=sum(file.size_bytes for file in weights.values()),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=architecture,
        dtype=_dtype(tensors),
        context_tokens=context_tokens,
        vocabulary_tokens=len(tokenizer.ids),
        tokenizer_fingerprint=tokenizer.fingerprint,
        scheme=scheme,
        labels=labels,
    )
    return Verified(facts, files, unused, linear_shapes(model))


def count_parameters(folder: Path) -> int:
    """Parameters that a folder's files hold, quantised ones included. Raises PreparationError."""
    weights = weight_files(folder, files_in(folder, folder))
    tensors = [entry for name in weights for entry in read_header(folder / name).tensors]
    full = full_tensors({entry.name: entry for entry in tensors}, scheme_of(read_config(folder)))
    return sum(prod(entry.shape) for entry in full.values())


def _digests(
    folder: Path, names: Iterable[str], weights: Mapping[str, WeightFile], log: Callable[[str], None]
) -> dict[str, str]:
    """File name -> SHA-256 of the files that the model is made of; reads the weights on the way."""
    digests = {}
    for name in names:
        if name in weights:
            log(f"reading {name}, {weights[name].size_bytes} bytes")
            digests[name] = read_values(weights[name])
        elif is_made(name) or (name.startswith(ADAPTER) and name.endswith(".safetensors")):
            digests[name] = read_values(read_header(folder / name))
        elif not name.endswith(".safetensors"):
            digests[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return digests


def _require_digests(files: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name, digest in expected.items():
        if files.get(name, digest) != digest:
            raise PreparationError(
                Reason.CORRUPT_WEIGHTS,
                f"{name} is not what the hub published (SHA-256 {files[name][:12]}… and not {digest[:12]}…): "
                "the fetch must be repeated",
            )


def _tensors(weights: Mapping[str, WeightFile], promised: Mapping[str, set[str] | None]) -> dict[str, TensorEntry]:
    """All tensors by name; each file must hold what the index promises, and no tensor may come twice."""
    tensors: dict[str, TensorEntry] = {}
    for file, content in weights.items():
        found = {entry.name: entry for entry in content.tensors}
        index = promised[file]
        if index is not None and index != set(found):
            odd = sorted(index ^ set(found))[0]
            where = "is missing in the file" if odd in index else "is missing in the index"
            raise PreparationError(
                Reason.MISSING_WEIGHTS, f"the index and {file} disagree: {odd} {where}. Publish both anew"
            )
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise PreparationError(Reason.CORRUPT_WEIGHTS, f"{twice[0]} is in more than one file: publish them anew")
        tensors |= found
    return tensors


def _digest(files: Mapping[str, str]) -> str:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def _dtype(tensors: Mapping[str, TensorEntry]) -> str:
    """Data type of most values, as torch names it."""
    counts: Counter[str] = Counter()
    for entry in tensors.values():
        counts[entry.dtype.name] += prod(entry.shape)
    return counts.most_common(1)[0][0]


def _context_tokens(config: Any, model: Any, tokenizer: TokenizerFacts) -> int:
    """Longest sequence that the model takes.

    Position tables that begin behind a padding index (RoBERTa and its kin) hold fewer positions than rows.
    """
    for field in _POSITION_FIELDS:
        positions = getattr(config, field, None)
        if isinstance(positions, int) and positions > 0:
            break
    else:
        positions = tokenizer.limit_tokens
    if positions is None:
        raise PreparationError(
            Reason.INVALID_CONFIG, f"{CONFIG} does not say how long a sequence may be: add max_position_embeddings"
        )
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = min(positions, module.num_embeddings - module.padding_idx - 1)
    if positions < 1:
        raise PreparationError(Reason.INVALID_CONFIG, f"{CONFIG} leaves no room for a token")
    return positions


def _labels(config: Any) -> list[str]:
    """Labels in the order of the head, cut to what a status may hold."""
    if config.num_labels < 2:
        raise PreparationError(
            Reason.LABEL_MISMATCH, f"{CONFIG} has {config.num_labels} label: a classifier needs at least two"
        )
    if set(config.id2label) != set(range(config.num_labels)):
        raise PreparationError(
            Reason.LABEL_MISMATCH, f"id2label in {CONFIG} must number its labels from 0 to {config.num_labels - 1}"
        )
    labels = [str(config.id2label[index]) for index in range(config.num_labels)]
    return [label[:_MAX_LABEL_CHARACTERS] for label in labels[:_MAX_LABELS]]
