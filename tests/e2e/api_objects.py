"""Objects of our kinds as the API server takes them, their places there, and the tables of right and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

TABLES = Path(__file__).parents[1] / "api" / "tables"
PLURALS = {"EmulatorPool": "emulatorpools", "TrainingRun": "trainingruns"}
POD = {"spec": {"containers": [{"name": "emulator", "image": "i"}]}}
Object = dict[str, Any]


def entries(name: str) -> list[Any]:
    read = yaml.safe_load((TABLES / name).read_text())
    return [pytest.param(entry, id=f"{entry['kind']}: {entry['case']}") for entry in read]


def document(kind: str, spec: Any, name: str = "x") -> Object:
    return {"apiVersion": "tapforge.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def place(namespace: str, kind: str, name: str = "", group: str = "tapforge.dev") -> str:
    return f"/apis/{group}/v1alpha1/namespaces/{namespace}/{PLURALS[kind]}{name and '/'}{name}"
