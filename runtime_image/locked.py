"""What the image installs, from pyproject.toml and uv.lock in the working folder: lists for pip.

    locked.py RUNTIME QUANTISE

Each folder holds `constraints.txt`, pins and hashes of the lock file, without and with the extra `quantise`. The first
gets `requirements.txt`, what the runtime asks for; the second `quantise.txt`, what the extra adds to that as wheels,
and `sources.txt`, what it adds as sources only, with hashes.
"""

import re
import sys
import tomllib
from pathlib import Path


def main(runtime: Path, quantise: Path) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["runtime"]]
    (runtime / "requirements.txt").write_text("\n".join(direct) + "\n")
    added = _names(quantise / "constraints.txt") - _names(runtime / "constraints.txt")
    packages = [
        package for package in tomllib.loads(Path("uv.lock").read_text())["package"] if package["name"] in added
    ]
    wheels = [package["name"] for package in packages if package.get("wheels")]
    sources = [
        f"{package['name']}=={package['version']} --hash={package['sdist']['hash']}"
        for package in packages
        if not package.get("wheels")
    ]
    (quantise / "quantise.txt").write_text("\n".join(wheels) + "\n")
    (quantise / "sources.txt").write_text("\n".join(sources) + "\n")


def _names(constraints: Path) -> set[str]:
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==", constraints.read_text(), re.MULTILINE))


main(*map(Path, sys.argv[1:]))
