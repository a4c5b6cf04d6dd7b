"""A folder of prepared weights, written beside its place and moved there when it is whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold_runtime.prepare.failures import PreparationError, Reason
from sixfold_runtime.prepare.files import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    adapter_files,
    files_in,
    read_json,
    weight_files,
)

if TYPE_CHECKING:
    import torch  # seconds, which a fault in a small file need not wait for

_MAX_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Workspace:
    """Where a preparation writes: hidden folders beside `target`, on the same claim."""

    target: Path

    def folder(self, name: str) -> Path:
        """An empty hidden folder: what a run left there that died is gone."""
        folder = self.target.with_name(f".{self.target.name}.{name}.partial")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def publish(self, folder: Path) -> None:
        """Move a whole folder to its place; an older one goes."""
        old = self.target.with_name(f".{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        folder.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)

    def clear(self) -> None:
        """Remove every hidden folder of this target."""
        for leftover in self.target.parent.glob(f".{self.target.name}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turns the system's errors of writing into PreparationErrors: DiskFull, ClaimNotWritable, ReadFailed."""
    try:
        yield
    except PreparationError:
        raise
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        # safetensors and torch hide the number in their text.
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise PreparationError(
                Reason.DISK_FULL, f"the claim filled up while {target.name} was written: use a larger claim"
            ) from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PreparationError(
                Reason.CLAIM_NOT_WRITABLE,
                f"{target.name} can't be written ({error}): the artifact's claim must be writable for user 65532",
            ) from error
        if isinstance(error, OSError):
            raise PreparationError(Reason.READ_FAILED, f"{target.name} can't be prepared: {error}") from error
        raise


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy what belongs to a model whichever its weights are: configuration, tokenizer, template, generation settings.

    Exit heads and task slices stay behind: they are for the source's weights.
    """
    for name in files_in(source, source):
        if not name.endswith(".safetensors") and name != WEIGHTS_INDEX:
            shutil.copyfile(source / name, target / name)


def copy_model(source: Path, target: Path) -> None:
    """Copy a model with adapter, exit heads and task slices; on one claim the weights take no space twice."""
    for name in [*files_in(source, source), *adapter_files(source, source)]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            try:
                os.link((source / name).resolve(), target / name)
                continue
            except OSError:
                pass  # another claim, or a file system without links
        shutil.copyfile(source / name, target / name)


def write_config(target: Path, quantization: Mapping[str, Any]) -> None:
    """Say in config.json how the weights are quantised."""
    content = read_json(target / CONFIG) | {"quantization_config": dict(quantization)}
    (target / CONFIG).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_weights(target: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write tensors to as few files as hold them; only one file's are in memory at a time."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = 0

    def flush() -> None:
        save_file(pending, target / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(held.nbytes for held in pending.values()) + tensor.nbytes > _MAX_SHARD_BYTES:
            flush()
        pending[name] = tensor.contiguous()
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        (target / "shard-0").rename(target / WEIGHTS)
        return
    places: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        (target / f"shard-{index}").rename(target / file)
        places |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    (target / WEIGHTS_INDEX).write_text(json.dumps(content, indent=1))


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's weight files."""
    return sum((folder / name).stat().st_size for name in weight_files(folder, files_in(folder, folder)))
