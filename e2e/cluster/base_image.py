"""A stand-in for the official slim Python image where no image registry can be reached: Debian's own Python."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from console import step
from paths import CACHE
from processes import run

SUITE = "bookworm"  # its Python is 3.11, like the Dockerfiles' default base image
PACKAGES = ("ca-certificates", "python3", "python3-venv")
FALLBACK_MIRROR = "http://deb.debian.org/debian"
NAME = f"localhost/sixfold-base:{hashlib.sha256(' '.join((SUITE, *PACKAGES)).encode()).hexdigest()[:12]}"


def _mirror() -> str:
    """The mirror that this machine's apt uses for the suite, else Debian's own."""
    if shutil.which("apt-get") is None:
        return FALLBACK_MIRROR
    form = "$(REPO_URI) $(CODENAME) $(COMPONENT)"
    for line in run("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines():
        uri, codename, component = line.split()
        if (codename, component) == (SUITE, "main"):
            return uri
    return FALLBACK_MIRROR


def build(buildah: Callable[..., str]) -> None:
    """Make the base image from a fresh root file system, without apt's lists and archives."""
    with step("base image from Debian's packages"), tempfile.TemporaryDirectory(dir=CACHE) as folder:
        root = Path(folder) / "root"
        include = f"--include={','.join(PACKAGES)}"
        run("debootstrap", "--variant=minbase", include, SUITE, root, _mirror())
        for waste in ("var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / waste)
            (root / waste).mkdir()
        dockerfile = Path(folder) / "Dockerfile"
        dockerfile.write_text('FROM scratch\nCOPY . /\nCMD ["python3"]\n')
        buildah("build", "--quiet", "--isolation", "chroot", "--tag", NAME, "--file", str(dockerfile), str(root))
