"""What the image installs, from pyproject.toml and uv.lock in the working folder: lists for pip, into a folder.

`requirements.txt`: what the runtime asks for. `quantise.txt`: what the extra `quantise` adds to that as wheels;
`sources.txt`: what it adds as sources only, with hashes.
"""

import re
import sys
import tomllib
from pathlib import Path


def main(folder: Path) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["runtime"]]
    (folder / "requirements.txt").write_text("\n".join(direct) + "\n")
    added = _names(folder / "quantise-constraints.txt") - _names(folder / "constraints.txt")
    packages = [
        package for package in tomllib.loads(Path("uv.lock").read_text())["package"] if package["name"] in added
    ]
    wheels = [package["name"] for package in packages if package.get("wheels")]
    sources = [
        f"{package['name']}=={package['version']} --hash={package['sdist']['hash']}"
        for package in packages
        if not package.get("wheels")
    ]
    (folder / "quantise.txt").write_text("\n".join(wheels) + "\n")
    (folder / "sources.txt").write_text("\n".join(sources) + "\n")


def _names(constraints: Path) -> set[str]:
    return set(re.findall(r"^([a-z0-9][a-z0-9._-]*)==", constraints.read_text(), re.MULTILINE))


main(Path(sys.argv[1]))
