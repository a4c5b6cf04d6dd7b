"""Container images: both of the product from the shipped Dockerfiles, brought into the cluster in use, and what others
make where no registry can be reached: Redis, Prometheus, Alertmanager."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import base_image
import binaries
import content_import
import node
from console import HarnessError, say, step
from paths import CACHE, CLUSTER, IMAGES_FILE, PROMETHEUS_SOURCE, REPOSITORY
from processes import run
from target import KIND_CLUSTER, Target, docker_answers

LIBRARY = "docker.io/library/"  # where the kubelet looks for a name without a registry
DOCKERFILES = {"operator": "operator/Dockerfile", "runtime": "runtime_image/Dockerfile"}
STAND_INS = {part: f"e2e/cluster/{part}.Dockerfile" for part in ("redis", "prometheus", "alertmanager")}
"""Elsewhere the chart's default images are pulled."""
CONTEXT = ("LICENSE", "README.md", "pyproject.toml", "uv.lock", "crds", "operator", "runtime_image")
AUTHORITIES = "/etc/ssl/certs"
STORAGE = CACHE / "buildah"
KEPT_STAGES = 8
LAYOUT = content_import.Layout(CACHE / "layout")


def ensure(target: Target) -> dict[str, str]:
    """Build what is missing, bring it into the cluster, and return the images' names by part.

    The names end with a hash of what goes in, so that a change gets a new name and pods are replaced. They are also
    written to `images.json`. Raises HarnessError when a build fails or when a cluster needs a registry.
    """
    names = {part: f"sixfold-{part}:{_inputs_hash(part)}" for part in DOCKERFILES}
    if target.kind == "embedded":
        names |= {part: f"sixfold-{part}:{_stand_in_hash(part)}" for part in STAND_INS}
        for part, name in names.items():
            _into_embedded(part, name)
        _forget_others(names.values())
    elif target.kind == "kind":
        for part, name in names.items():
            _docker_build(part, name)
            with step(f"loading {name} into kind"):
                run("kind", "load", "docker-image", "--name", KIND_CLUSTER, name)
    else:
        names = {part: f"{_registry()}/{name}" for part, name in names.items()}
        for part, name in names.items():
            _docker_build(part, name)
            with step(f"pushing {name}"):
                run("docker", "push", name)
    CLUSTER.mkdir(parents=True, exist_ok=True)
    IMAGES_FILE.write_text(json.dumps(names))
    return names


def _inputs_hash(part: str) -> str:
    """12 hex digits that name everything that the image is made of (the files that .dockerignore lets through)."""
    digest = hashlib.sha256(os.environ.get("TORCH_INDEX", "").encode())
    digest.update(base_image.NAME.encode())
    for path in [REPOSITORY / DOCKERFILES[part], *_context_files()]:
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _stand_in_hash(part: str) -> str:
    digest = hashlib.sha256(base_image.NAME.encode() + (REPOSITORY / STAND_INS[part]).read_bytes())
    if part == "prometheus":
        digest.update((PROMETHEUS_SOURCE / "go.mod").read_bytes())
    return digest.hexdigest()[:12]


def _context_files() -> Iterable[Path]:
    for top in (REPOSITORY / name for name in CONTEXT):
        files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        for path in files:
            ignored = path.name == "Dockerfile" or path.parent.name == "__pycache__"
            if not ignored and not (path.parent.name == "crds" and path.suffix == ".yaml"):
                yield path


def _build_arguments() -> list[str]:
    index = os.environ.get("TORCH_INDEX")
    return ["--build-arg", f"TORCH_INDEX={index}"] if index else []


def _buildah(*arguments: str) -> str:
    """buildah with a storage of its own."""
    storage = ("--root", STORAGE / "root", "--runroot", STORAGE / "run", "--storage-driver", "overlay")
    return run("buildah", *storage, *arguments)


def _has(image: str) -> bool:
    return bool(_buildah("images", "--quiet", "--filter", f"reference={image}").strip())


def _into_embedded(part: str, name: str) -> None:
    full = f"{LIBRARY}{name}"
    if full in node.ctr("images", "list", "--quiet").split():
        say(f"  {name} is in the cluster")
        return
    local = f"localhost/{name}"
    if not _has(base_image.NAME):
        base_image.build(_buildah)
    if not _has(local):
        with step(f"building {name}" + (" (torch: minutes, the first time)" if part == "runtime" else "")):
            flags = ["--layers", "--isolation", "chroot", "--network", "host", *_build_arguments()]
            flags += ["--build-arg", f"BASE_IMAGE={base_image.NAME}", "--volume", f"{AUTHORITIES}:{AUTHORITIES}:ro"]
            dockerfile = str(REPOSITORY / (DOCKERFILES | STAND_INS)[part])
            context = binaries.prometheus() if part == "prometheus" else REPOSITORY
            _buildah("build", "--quiet", *flags, "--tag", local, "--file", dockerfile, str(context))
    with step(f"importing {name}"):
        source = f"containers-storage:[overlay@{STORAGE / 'root'}+{STORAGE / 'run'}]{local}"
        destination = f"oci:{LAYOUT.folder}:{name}"
        uncompressed = "--dest-oci-accept-uncompressed-layers"
        run("skopeo", "copy", "--quiet", "--insecure-policy", uncompressed, source, destination)
        known = set(node.ctr("content", "list", "--quiet").split())
        moved_bytes = content_import.bring_in(LAYOUT, name, full, known, node.ctr_command("images", "import", "-"))
        LAYOUT.share(LAYOUT.parts(LAYOUT.manifest(name)), node.FOLDERS.images)
        base, *above = LAYOUT.layer_sizes_bytes(name)
        size = f"{sum(above) / 1e6:.0f} MB above a base image of {base / 1e6:.0f} MB"
        say(f"      {moved_bytes / 1e6:.1f} MB moved; {size}")


def _forget_others(names: Iterable[str]) -> None:
    """Drop the images of earlier sources, except those that a container still runs."""
    kept = set(names)
    LAYOUT.prune(kept)
    for image in _buildah("images", "--noheading", "--format", "{{.Name}}:{{.Tag}}").split():
        name = image.removeprefix("localhost/")
        if _is_one_of_ours(name) and name not in kept:
            _buildah("rmi", image)
    # Stages of builds have no name. The newest ones are those that the next build takes from the cache.
    stages = _buildah("images", "--filter", "dangling=true", "--format", "{{.ID}}").split()
    if old := stages[KEPT_STAGES:]:
        _buildah("rmi", *old)
    used = {row.split()[1].removeprefix(LIBRARY) for row in node.ctr("containers", "list").splitlines()[1:]}
    digests = {row[0]: row[2] for row in map(str.split, node.ctr("images", "list").splitlines()[1:])}
    ours = {name for name in digests if _is_one_of_ours(name.removeprefix(LIBRARY))}
    needed = {digests[name] for name in ours if name.removeprefix(LIBRARY) in kept | used}
    # The CRI plugin adds a second reference, by digest, to each image; either keeps its layers on the disk.
    unneeded = {digests[name] for name in ours} - needed
    if references := [name for name, digest in digests.items() if digest in unneeded]:
        node.ctr("images", "remove", *references)


def _is_one_of_ours(name: str) -> bool:
    return name.startswith(tuple(f"sixfold-{part}:" for part in (*DOCKERFILES, *STAND_INS)))


def _docker_build(part: str, name: str) -> None:
    if not docker_answers():
        raise HarnessError("building images for this cluster needs a Docker engine, and none answers")
    with step(f"building {name}"):
        dockerfile = REPOSITORY / DOCKERFILES[part]
        run("docker", "build", *_build_arguments(), "--tag", name, "--file", dockerfile, REPOSITORY)


def _registry() -> str:
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    if not registry:
        raise HarnessError(
            "this cluster pulls its images: set REGISTRY=<host/path> to one that it can pull from and that "
            "`docker push` may write to"
        )
    return registry
