"""Argo CD's health checks, run as it runs them: Lua 5.1 with the base library and tables and nothing else, the object
as the global `obj`, a table with `status` and `message` as the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lupa.lua51 import LuaRuntime

CHECKS: Final = Path(__file__).parents[2] / "manifests" / "gitops" / "argocd"
STATUSES: Final = ("Healthy", "Progressing", "Degraded", "Suspended")
#: a Lua 5.1 has more than Argo CD lets a check see; the last line takes the methods of strings
_CLOSE: Final = """
local more = {"string", "math", "io", "os", "debug", "coroutine", "python", "dofile", "loadfile", "require", "package"}
for _, name in ipairs(more) do
  _G[name] = nil
end
getmetatable("").__index = nil
"""


@dataclass(frozen=True, slots=True)
class Health:
    status: str
    message: str


def health(thing: Mapping[str, Any]) -> Health:
    """What Argo CD says of an EmulatorPool or a TrainingRun."""
    check = CHECKS / f"{thing['kind'].lower()}.lua"
    lua = LuaRuntime(unpack_returned_tuples=True, register_eval=False, register_builtins=False)
    lua.globals().obj = lua.table_from(thing, recursive=True)
    lua.execute(_CLOSE)
    said = lua.execute(check.read_text())
    found = Health(said["status"], said["message"])
    if found.status not in STATUSES or not isinstance(found.message, str):
        raise ValueError(f"{check.name} answers {found}: Argo CD knows no such health")
    return found
