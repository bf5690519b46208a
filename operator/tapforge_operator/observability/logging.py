"""What the operator says on standard output: one line of JSON per record, or lines for a person.

A line of JSON has `time` (RFC 3339, UTC, milliseconds), `level`, `logger`, `message`; `object` with kind, namespace,
name and uid where a record speaks of an object; `exception` with the traceback where there is one. Nothing that a
message holds can break the line.

Libraries are quiet: their INFO records every single event. At DEBUG everything is logged. An ERROR is worth an alert.

The audit log (`broker/audit.py`) has lines with fields of its own instead of `message`, at whatever level the others
begin.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
#: logger of the audit log
AUDIT: Final = "tapforge_operator.audit"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

#: libraries whose INFO is of no use to the operator's administrator
_CHATTY: Final = ("kopf", "aiohttp", "asyncio", "opentelemetry")
_REFERENCE: Final = ("kind", "namespace", "name", "uid")


def ref(kind: str, namespace: str, name: str, uid: str = "") -> dict[str, Mapping[str, str]]:
    """`log.info("...", extra=ref("EmulatorPool", "default", "phones", uid))`."""
    return {"ref": {"kind": kind, "namespace": namespace, "name": name, "uid": uid}}


def configure(level: str = "INFO", plain: bool = False, stream: TextIO | None = None, audit: bool = True) -> None:
    """Takes over the process' logging: the only handler, on standard output. `audit`: the audit log is written."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(_Plain() if plain else _Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(level if level == "DEBUG" else max(root.level, logging.WARNING))
    logging.getLogger(AUDIT).setLevel(logging.INFO if audit else logging.CRITICAL)
    logging.captureWarnings(True)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname, "logger": record.name}
        if isinstance(record.msg, dict):
            return _encode(line | record.msg)
        line["message"] = record.getMessage()
        if reference := _reference(record):
            line["object"] = reference
        if trouble := _trouble(self, record):
            line["exception"] = trouble
        return _encode(line)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = _reference(record)
        where = f" [{about.get('kind', '')} {about.get('namespace', '')}/{about.get('name', '')}]" if about else ""
        said = json.dumps(record.msg) if isinstance(record.msg, dict) else record.getMessage()
        line = f"{_time(record)} {record.levelname} {record.name}{where}: {said}"
        trouble = _trouble(self, record)
        return f"{line}\n{trouble}" if trouble else line


def _time(record: logging.LogRecord) -> str:
    return rfc3339(record.created)


def rfc3339(seconds: float) -> str:
    """Seconds since 1970, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _reference(record: logging.LogRecord) -> dict[str, str]:
    """What is empty is left out."""
    given = getattr(record, "ref", None)
    if not isinstance(given, Mapping):
        return {}
    return {key: str(given[key]) for key in _REFERENCE if given.get(key)}


def _trouble(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else record.exc_text]
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(part for part in parts if part)
