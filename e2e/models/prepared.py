"""The example classifier as its ModelVariant asks for it: exit heads trained and calibrated by `sixfold prepare`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cache import cached_folder
from sources import sha256_of

from sixfold_api.base import ApiModel
from sixfold_api.variant import CLAIM_SCHEME, ModelVariantSpec
from sixfold_runtime import manifests

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
CLAIM = "models"
PREPARATION = REPOSITORY / "runtime_image" / "sixfold_runtime" / "prepare"
HEADS_COME_FROM = ("exits", "exit_texts", "exit_features", "exit_training")
"""Modules of the preparation that decide what is in exits.safetensors."""


class PreparationFailedError(RuntimeError):
    """What is missing, or what `sixfold prepare` printed as it refused."""


def prepared_example(name: str = "film-sentiment") -> Path:
    """Folder of a variant of examples/variants.yaml, prepared on the first call and kept in the cache.

    Raises PreparationFailedError, also where the built models and texts are missing.
    """
    found = manifests.read([EXAMPLES / "variants.yaml"]).variants
    spec = next(variant.spec for variant in found if variant.name == name)
    inputs = [_path(uri) for uri in _uris(spec)]
    if missing := [path for path in inputs if not path.exists()]:
        raise PreparationFailedError(f"{missing[0]} is not there: `make models` builds it")
    files = [file for path in inputs for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files += [PREPARATION / f"{module}.py" for module in HEADS_COME_FROM]
    facts = [spec.model_dump_json(), *(sha256_of(file) for file in files if file.is_file())]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    return cached_folder(f"prepared-{name}", key, lambda folder: _prepare(spec, inputs, folder / name)) / name


def _uris(spec: ModelVariantSpec) -> list[str]:
    texts = (spec.exit_heads and spec.exit_heads.training, spec.calibration, spec.evaluation)
    return [spec.source.uri or "", *(text.uri for text in texts if text is not None)]


def _path(uri: str) -> Path:
    return EXAMPLES / uri.removeprefix(CLAIM_SCHEME)


def _prepare(spec: ModelVariantSpec, inputs: list[Path], target: Path) -> None:
    """As the Job does it, with a claim that holds copies: what lies on a claim must not lead out of it."""
    source = inputs[0]
    with TemporaryDirectory() as scratch:
        claim = Path(scratch) / CLAIM
        shutil.copytree(source, claim / source.name)
        for path in inputs[1:]:
            (claim / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, claim / path.parent.name / path.name)
        arguments = {
            "source": spec.source.uri,
            "task": spec.task,
            "claims": scratch,
            "artifact-claim": CLAIM,
            "artifact-path": target.name,
            "summary": f"{scratch}/summary.json",
            "calibration": _json(spec.calibration),
            "evaluation": _json(spec.evaluation),
            "exit-heads": _json(spec.exit_heads),
            "slices": f"[{','.join(map(_json, spec.slices))}]",
        }
        command = [sys.executable, "-m", "sixfold_runtime.cli", "prepare"]
        command += [part for option, value in arguments.items() if value for part in (f"--{option}", str(value))]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise PreparationFailedError(done.stderr[-4000:])
        shutil.copytree(claim / target.name, target)


def _json(part: ApiModel | None) -> str:
    """As the Job is given it; "" for what the variant lacks."""
    return part.model_dump_json(by_alias=True, exclude_none=True) if part is not None else ""
