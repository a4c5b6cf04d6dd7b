"""The folder `operator/` must never shadow the standard library's module of that name."""

import operator
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_operator_is_the_standard_librarys() -> None:
    assert operator.itemgetter(1)("ab") == "b"
    assert Path(operator.__file__).is_relative_to(sysconfig.get_path("stdlib"))


def test_it_is_in_a_fresh_interpreter_at_the_root_of_the_repository() -> None:
    code = "import operator; print(operator.itemgetter(0)('x'), operator.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    letter, file = done.stdout.split()
    assert letter == "x"
    assert Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def test_no_package_of_that_name_is_in_the_repository() -> None:
    folders = [ROOT, ROOT / "operator", ROOT / "tests"]
    assert not [folder for folder in folders if (folder / "__init__.py").exists()]
    assert not list((ROOT / "tests").rglob("__init__.py"))
