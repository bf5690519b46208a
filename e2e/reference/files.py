"""Every generated file of docs/reference, by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tapforge_api.loading import KINDS
from tapforge_api.reference import page as fields_page
from tapforge_envs.openapi import openapi
from tapforge_trainer.telemetry.schema import json_schema

from .commands import cli_page
from .figures import figures_page
from .protocol import protocol_page
from .records import events_page, summary_page
from .rules import rules_page

FOLDER: Final = Path(__file__).parents[2] / "docs" / "reference"


def files() -> dict[str, str]:
    return {
        **{f"{kind.lower()}.md": fields_page(kind) for kind in KINDS},
        "cli.md": cli_page(),
        "figures.md": figures_page(),
        "rules.md": rules_page(),
        "events.md": events_page(),
        "events.schema.json": _json(json_schema("events")),
        "summary.md": summary_page(),
        "summary.schema.json": _json(json_schema("summary")),
        "protocol.md": protocol_page(),
        "openapi.json": _json(openapi()),
    }


def _json(thing: Any) -> str:
    return json.dumps(thing, indent=1) + "\n"
