"""From one folder of several images in OCI's layout (`e2e/images`) to one archive per image, named by the release.

An archive (oci-archive) is a tar of OCI's layout with one image: podman, skopeo, ctr and Docker 25 or newer read it.
The same blobs give the same archive, byte for byte: names are sorted, and times are zero.
"""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

Json = dict[str, Any]
_NAME = "org.opencontainers.image.ref.name"


def archive(layout: Path, name: str, new_name: str, target: Path) -> str:
    """Writes the image `name` of the layout as `new_name` (HOST/OWNER/IMAGE:TAG) to `target`. Returns its digest."""
    index: Json = json.loads((layout / "index.json").read_text())
    (found,) = [one for one in index["manifests"] if one["annotations"][_NAME] == name]
    named = {_NAME: new_name.rpartition(":")[2], "io.containerd.image.name": new_name}
    manifests = [{**found, "annotations": named}]
    blobs = {found["digest"], *_blobs(layout, found["digest"])}
    with tarfile.open(target, "w") as tar:
        _add(tar, "oci-layout", (layout / "oci-layout").read_bytes())
        _add(tar, "index.json", json.dumps({**index, "manifests": manifests}, sort_keys=True).encode())
        for digest in sorted(blobs):
            path = _path(layout, digest)
            with path.open("rb") as source:
                tar.addfile(_entry(f"blobs/{digest.replace(':', '/')}", path.stat().st_size), source)
    return str(found["digest"])


def _blobs(layout: Path, digest: str) -> set[str]:
    """What a manifest names: its config and its layers."""
    manifest: Json = json.loads(_path(layout, digest).read_text())
    return {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}


def _path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    tar.addfile(_entry(name, len(content)), io.BytesIO(content))
