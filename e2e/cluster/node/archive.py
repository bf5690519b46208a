"""An image of a few files, without a builder: a docker archive (a layer, a configuration, a manifest)."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write(
    path: Path,
    name: str,
    contents: Mapping[str, Path | bytes],
    *,
    folders: Sequence[str] = (),
    command: Sequence[str] = (),
    user: str = "65532:65532",
) -> Path:
    """`contents`: place in the image -> program that lies there, or text. Returns `path`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in folders:
            about = tarfile.TarInfo(folder.strip("/"))
            # Like /tmp: also for those who are not root.
            about.type, about.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(about)
        for place, content in contents.items():
            about = tarfile.TarInfo(place.strip("/"))
            data = content if isinstance(content, bytes) else content.read_bytes()
            about.mode, about.size = 0o644 if isinstance(content, bytes) else 0o755, len(data)
            tar.addfile(about, io.BytesIO(data))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    configuration = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Cmd": list(command), "User": user},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for entry, data in (
            (f"{digest}/layer.tar", layer.getvalue()),
            (config_name, configuration),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            about = tarfile.TarInfo(entry)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path
