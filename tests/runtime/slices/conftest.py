"""Fixtures of task slices; slice_models.py makes the models."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from slice_models import CPU, save_model

from sixfold_runtime.prepare.slice_trunk import SliceTrunk, open_trunk

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "chat", "Llama", "ForCausalLM")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "intent", "Bert", "ForSequenceClassification")


@pytest.fixture
def own(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a model that a test may write to."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / folder.name))


@pytest.fixture
def generating(own: Callable[[Path], Path], generator: Path) -> SliceTrunk:
    return open_trunk(own(generator), CPU)
