"""Debian packages that tests and the cluster need: `packages.py redis-server chromium` installs what is missing."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from console import HarnessError, step
from paths import CACHE
from processes import exclusive, run

PROGRAMS = {
    "redis-server": "redis-server",
    "redis-sentinel": "redis-sentinel",
    "redis-cli": "redis-tools",
    "chromium": "chromium",
    "node": "nodejs",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
}
"""What tests may ask for by name, and the package that brings it."""


def install(needed: Mapping[str, str]) -> None:
    """Install the packages whose program is missing; services that they bring are not started.

    Args:
        needed: the package of each program.

    Raises:
        HarnessError: it can't be installed here.
    """
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = [package for program, package in needed.items() if not shutil.which(program, path=search)]
    if not packages:
        return
    missing = " ".join(packages)
    if os.geteuid() or not shutil.which("apt-get"):
        raise HarnessError(f"these Debian packages are needed (or their programs from elsewhere): {missing}")
    with exclusive(CACHE / "packages.lock"), step(f"installing {missing}"), _no_service_starts():
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "update", "--quiet", env=environment)
        run("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *packages, env=environment)


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Keep Debian's packages from starting a system-wide etcd or Redis: the harness runs its own."""
    policy = Path("/usr/sbin/policy-rc.d")
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


if __name__ == "__main__":
    try:
        install({name: PROGRAMS[name] for name in sys.argv[1:]})
    except HarnessError as error:
        sys.exit(str(error))
