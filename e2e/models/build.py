"""Builds the example models that are missing and prints their folders: the last line of standard output is JSON.

    .venv/bin/python e2e/models/build.py                   # the committed pair as it is, the classifier from the cache
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
from pathlib import Path

# Before torch starts its threads. One thread repeats to the last bit and is the faster on a machine that others use.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # a fresh head would be reported as missing weights
sys.path.insert(0, str(Path(__file__).parent))

from cache import cached_folder, content_key, folder_bytes
from progress import CONSOLE
from sources import MINILM, VADER, SourceError

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
MODELS = ("chat", "chat-draft", "sentiment")


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
    folders = {name: EXAMPLES / name for name in names if name != "sentiment"}
    if "sentiment" in names:
        key = content_key(("classifier", "reviews"), [MINILM, VADER])
        folders["sentiment"] = cached_folder("sentiment", key, _build_sentiment) / "sentiment"
        _link(EXAMPLES / "sentiment", folders["sentiment"])
    return folders


def _link(link: Path, folder: Path) -> None:
    """Make the folder appear beside the committed models: `--claim models=examples/models` then finds all three."""
    if link.is_symlink():
        link.unlink()
    link.symlink_to(folder, target_is_directory=True)


def _build_sentiment(folder: Path) -> None:
    # Torch and transformers take seconds to import: only where something is built.
    from classifier import build_classifier

    build_classifier(folder)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=MODELS, help="build only this model (may be repeated)")
    parser.add_argument("--rebuild-pair", action="store_true", help="train chat and chat-draft again (half an hour)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
