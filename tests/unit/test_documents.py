"""What the Markdown files point to is there: links, verbs of the Makefile, benchmarks; policies in them are valid."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sixfold_api.policy import InferencePolicySpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "e2e" / "bench"))

import bench

FOLDERS = ("crds", "e2e", "examples", "helm", "operator", "runtime_image", "tests")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)")
VERB = re.compile(r"(?:^|[`\s])make ([a-z][a-z-]*)(?:[`\s]|$)", re.MULTILINE)


def tracked() -> list[Path]:
    """Files that Git knows and models' cards don't hold."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = [ROOT / line for line in listed.splitlines()] or [ROOT / "README.md", *ROOT.glob("*/README.md")]
    return sorted(path for path in found if path.exists())


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", tracked(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in LINK.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("path", tracked(), ids=lambda path: str(path.relative_to(ROOT)))
def test_verbs_and_benchmarks_are_there(path: Path) -> None:
    text = path.read_text()
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = (
        " ".join(re.findall(r"`([^`\n]*)`", text)) + "\n" + "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    )
    assert set(VERB.findall(code)) <= verbs
    assert set(re.findall(r"make bench B=(?!NAME|<)\"?(\w+)", text)) <= set(bench.BENCHES)


def test_the_policy_of_the_readme_is_one() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        InferencePolicySpec.model_validate(yaml.safe_load(block)["spec"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_says_what_lives_there(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    assert len(text.split()) > 40
    assert re.search(r"[Bb]egin|[Rr]ead", text), "where to begin reading"
