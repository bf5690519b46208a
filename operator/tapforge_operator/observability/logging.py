"""What the operator says on standard output: one line of JSON per record, or lines for a person.

A line of JSON has `time` (RFC 3339, UTC, milliseconds), `level`, `logger`, `message`; `object` with kind, namespace,
name and uid where a record speaks of an object; `exception` with the traceback where there is one. Nothing that a
message holds can break the line.

kopf and the libraries below it are quiet: their INFO tells of every single event. At DEBUG everything is said.

An ERROR is worth an alert. A request that kopf sends again is a WARNING at first, though kopf calls it an error: an API
server that answers 429 for a second is no broken operator. After six attempts (20 s, see `kube/informers.py`), or when
kopf gives up, it is an ERROR.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")

#: libraries whose INFO is of no use to the person who runs the operator
_CHATTY: Final = ("kopf", "aiohttp", "asyncio", "opentelemetry")
#: what kopf says of a request that it sends again: kopf/_cogs/clients/api.py, `request`
_SENT_AGAIN: Final = re.compile(r"Request attempt #(\d+)\S* failed; (?:\w+ closed; )?will (?:retry|re-authenticate): ")
_ATTEMPTS: Final = 6
_REFERENCE: Final = ("kind", "namespace", "name", "uid")


def ref(kind: str, namespace: str, name: str, uid: str = "") -> dict[str, Mapping[str, str]]:
    """`log.info("...", extra=ref("EmulatorPool", "default", "phones", uid))`."""
    return {"ref": {"kind": kind, "namespace": namespace, "name": name, "uid": uid}}


def configure(level: str = "INFO", plain: bool = False, stream: TextIO | None = None) -> None:
    """Takes over the process' logging: the only handler, on standard output."""
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(_Plain() if plain else _Json())
    handler.addFilter(_calmed)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(level if level == "DEBUG" else max(root.level, logging.WARNING))
    logging.captureWarnings(True)


def _calmed(record: logging.LogRecord) -> bool:
    """Whether it is told."""
    if record.levelno == logging.ERROR and record.name.startswith("kopf"):
        # Not the message with its arguments: what can't be put together is for the handler to say.
        again = _SENT_AGAIN.match(str(record.msg))
        if again is not None and int(again[1]) <= _ATTEMPTS:
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            return logging.getLogger().isEnabledFor(logging.WARNING)
    return True


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if reference := _reference(record):
            line["object"] = reference
        if trouble := _trouble(self, record):
            line["exception"] = trouble
        return json.dumps(line, separators=(",", ":"))


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        about = _reference(record)
        where = f" [{about.get('kind', '')} {about.get('namespace', '')}/{about.get('name', '')}]" if about else ""
        line = f"{_time(record)} {record.levelname} {record.name}{where}: {record.getMessage()}"
        trouble = _trouble(self, record)
        return f"{line}\n{trouble}" if trouble else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _reference(record: logging.LogRecord) -> dict[str, str]:
    """Ours as `ref`, kopf's as `k8s_ref`; what is empty is left out."""
    given = getattr(record, "ref", None) or getattr(record, "k8s_ref", None)
    if not isinstance(given, Mapping):
        return {}
    return {key: str(given[key]) for key in _REFERENCE if given.get(key)}


def _trouble(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else record.exc_text]
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(part for part in parts if part)
