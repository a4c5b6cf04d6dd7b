"""Builds the example models and texts that are missing, and prints their folders as JSON in the last line.

    .venv/bin/python e2e/models/build.py                   # the committed pair as it is, the others from the cache
    .venv/bin/python e2e/models/build.py --only sentiment
    .venv/bin/python e2e/models/build.py --rebuild-pair    # trains the pair and puts it in place of the committed one

Built folders are kept in ${SIXFOLD_CACHE:-~/.cache/sixfold}/models under a hash of code, data and library versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Before torch starts its threads. One thread repeats to the last bit and is the faster on a machine that others use.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # a fresh head would be reported as missing weights
sys.path.insert(0, str(Path(__file__).parent))

from cache import cached_folder, content_key, folder_bytes
from progress import CONSOLE
from sources import MINILM, VADER, WORDNET, Package, SourceError

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"


@dataclass(frozen=True)
class Recipe:
    """How a folder that isn't committed is built, and all that its content depends on."""

    build: Callable[[Path], None]
    modules: tuple[str, ...]
    packages: tuple[Package, ...]


def _build_sentiment(folder: Path) -> None:
    """The classifier, which other slices don't change, linked from the cache; then its slices."""
    # Torch and transformers take seconds to import: only where something is built.
    from classifier import build_classifier
    from slices import build_slices

    classifier = cached_folder("classifier", content_key(CLASSIFIER_MODULES, (MINILM, VADER)), build_classifier)
    shutil.copytree(classifier / "sentiment", folder / "sentiment", copy_function=os.link)
    build_slices(folder / "sentiment", _folder("tasks"))


def _build_reviews(folder: Path) -> None:
    from reviews import write_reviews

    write_reviews(folder / "reviews")


def _build_tasks(folder: Path) -> None:
    from tasks import write_tasks

    write_tasks(folder / "tasks")


COMMITTED = ("chat", "chat-draft")
CLASSIFIER_MODULES = ("classifier", "fine_tuning", "reviews")
TASK_MODULES = ("tasks", "wordnet")
SLICE_TRAINING = tuple(
    f"../../runtime_image/sixfold_runtime/prepare/{module}" for module in ("slice_model", "slice_train")
)
BUILT = {
    "sentiment": Recipe(
        _build_sentiment, (*CLASSIFIER_MODULES, *TASK_MODULES, *SLICE_TRAINING, "slices"), (MINILM, VADER, WORDNET)
    ),
    "reviews": Recipe(_build_reviews, ("reviews",), (VADER,)),
    "tasks": Recipe(_build_tasks, TASK_MODULES, (WORDNET,)),
}
MODELS = (*COMMITTED, *BUILT)


def main() -> int:
    options = _parse_arguments()
    start = time.monotonic()
    try:
        folders = build(options.only or list(MODELS), options.rebuild_pair)
    except SourceError as error:
        CONSOLE.print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
        return 1
    for name, folder in folders.items():
        megabytes = folder_bytes(folder) / 1e6
        CONSOLE.print(f"{name:<12}{megabytes:6.1f} MB  {folder}", highlight=False, soft_wrap=True)
    CONSOLE.print(f"example models ready after {time.monotonic() - start:.0f} s", highlight=False)
    print(json.dumps({name: str(folder) for name, folder in folders.items()}))
    return 0


def build(names: list[str], rebuild_pair: bool) -> dict[str, Path]:
    """Folder of each named model. Raises SourceError when a package that a build needs can't be had."""
    if rebuild_pair:
        from pair import build_pair

        for name, folder in build_pair().items():
            shutil.copytree(folder, EXAMPLES / name, dirs_exist_ok=True)
    folders = {name: EXAMPLES / name for name in names if name in COMMITTED}
    for name in [name for name in names if name in BUILT]:
        folders[name] = _folder(name)
        _link(EXAMPLES / name, folders[name])
    return folders


def _folder(name: str) -> Path:
    """In the cache; built on the first call."""
    recipe = BUILT[name]
    return cached_folder(name, content_key(recipe.modules, recipe.packages), recipe.build) / name


def _link(link: Path, folder: Path) -> None:
    """Make the folder appear beside the committed models: `--claim models=examples/models` then finds them all."""
    if link.is_symlink():
        link.unlink()
    link.symlink_to(folder, target_is_directory=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=MODELS, help="build only this one (may be repeated)")
    parser.add_argument("--rebuild-pair", action="store_true", help="train chat and chat-draft again (half an hour)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
