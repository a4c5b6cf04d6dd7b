"""Bring an image from buildah into containerd, moving only the layers that containerd lacks.

The image goes first into an OCI layout folder, uncompressed, so that equal layers have equal names and are written
once; then as an archive without the known layers. The layout's files are hard links to containerd's own, so the
gigabytes are on the disk once, and are still there when containerd's folder is not.
"""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from console import HarnessError

CONTENT = "io.containerd.content.v1.content/blobs/sha256"
OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'


class Layout:
    """An OCI image layout folder that keeps the current images' blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = folder / "index.json"

    def blob(self, digest: str) -> Path:
        """The file of a blob named `sha256:<hex>`."""
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def manifest(self, tag: str) -> dict[str, Any]:
        """The descriptor of the manifest that was pushed as `tag`."""
        for descriptor in self._manifests():
            if descriptor.get("annotations", {}).get("org.opencontainers.image.ref.name") == tag:
                return descriptor
        raise HarnessError(f"{self.folder} has no image {tag}")

    def parts(self, descriptor: dict[str, Any]) -> list[str]:
        """The digests of all that an image consists of: its manifest, configuration and layers."""
        manifest = json.loads(self.blob(descriptor["digest"]).read_text())
        return [descriptor["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]

    def layer_sizes_bytes(self, tag: str) -> list[int]:
        """The uncompressed sizes of an image's layers, the base image's first."""
        manifest = json.loads(self.blob(self.manifest(tag)["digest"]).read_text())
        return [layer["size"] for layer in manifest["layers"]]

    def prune(self, tags: Iterable[str]) -> None:
        """Forget every image but those of `tags`, and the blobs that only the others need."""
        kept = [self.manifest(tag) for tag in tags if tag in self._tags()]
        self._index.write_text(json.dumps({"schemaVersion": 2, "manifests": kept}))
        needed = {digest for descriptor in kept for digest in self.parts(descriptor)}
        for path in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{path.name}" not in needed:
                path.unlink()

    def share(self, digests: Iterable[str], containerd: Path) -> None:
        """Replace blobs by hard links to containerd's files of the same content."""
        for digest in digests:
            twin = containerd / CONTENT / digest.removeprefix("sha256:")
            mine = self.blob(digest)
            if not twin.exists() or twin.stat().st_dev != mine.stat().st_dev or twin.samefile(mine):
                continue
            link = mine.with_suffix(".link")
            os.link(twin, link)
            link.rename(mine)

    def _manifests(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._index.read_text())["manifests"]
        return found

    def _tags(self) -> list[str]:
        return [one.get("annotations", {}).get("org.opencontainers.image.ref.name") for one in self._manifests()]


def bring_in(layout: Layout, tag: str, name: str, known: set[str], command: list[str]) -> int:
    """Import the image `tag` of the layout as `name`, without the blobs in `known`; returns the bytes moved.

    `command` is containerd's import, reading an archive from its standard input.
    """
    descriptor = layout.manifest(tag)
    named = {**descriptor, "annotations": {"io.containerd.image.name": name}}
    index = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    importer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert importer.stdin is not None
    moved = 0
    try:
        with tarfile.open(fileobj=importer.stdin, mode="w|") as archive:
            for path, content in (("oci-layout", OCI_LAYOUT), ("index.json", index)):
                entry = tarfile.TarInfo(path)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
            for digest in layout.parts(descriptor):
                if digest not in known:
                    path = f"blobs/sha256/{digest.removeprefix('sha256:')}"
                    archive.add(layout.blob(digest), arcname=path)
                    moved += layout.blob(digest).stat().st_size
    except BrokenPipeError:
        pass  # the importer says why
    _, errors = importer.communicate()
    if importer.returncode:
        raise HarnessError(f"containerd did not take {name}:\n{errors.decode(errors='replace')}")
    return moved
