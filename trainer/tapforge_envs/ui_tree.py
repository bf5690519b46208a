"""What a UI tree says about the state: a hash of its nodes without what changes by itself. Pure; standard library only.

A tree is taken as the environment writes it: XML (uiautomator, AT-SPI), JSON (accessibility forests, DOM snapshots) or
lines of text. Rules, in order:
1. Left out with all that is below them: the status bar, toasts, clocks and timers that run (by package, id or role).
2. Left out of every node: places and sizes, numbers that a session gives (node ids, indices, hashes), the caret and the
   selected text, and the focus, except of a field that text goes into: there it decides what typing does.
3. All else counts, in document order: an unknown name splits states rather than merging them.
4. A tree with fewer than two nodes that say anything (games, Flutter, a picture viewer) tells no state: None. So does
   one that can't be read, or is longer than `MAX_TREE`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from xml.etree import ElementTree

#: characters
MAX_TREE = 8 * 1024 * 1024
#: nodes with words below which a tree tells no state
_LEAST = 2

#: (depth, attributes by plain name)
_Node = tuple[int, dict[str, str]]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLACES = _names(
    "bounds boundsinscreen boundsinparent bbox bboxpixels rect boundingbox boundingrect x y left top right bottom "
    "width height size position screencoord center offset drawingorder"
)
_NUMBERS = _names(
    "index nodeid backendnodeid uniqueid windowid parentid displayid childids pid hash hashcode timestamp instance "
    "depth naf"
)
_CARET = _names(
    "textselectionstart textselectionend selectionstart selectionend caret caretoffset caretposition cursor"
)
_FOCUS = _names("focused isfocused accessibilityfocused isaccessibilityfocused hasfocus")
_ROLES = ("class", "classname", "role", "type", "controltype", "tag")
_WORDS = _names(
    "text contentdesc contentdescription description name label value title hint hinttext placeholder tooltip alt "
    "arialabel words"
)
#: last part of a class, or a role
_RUNNING = _names("textclock analogclock digitalclock chronometer toast timer marquee clock statusbar")
_SYSTEM = ("com.android.systemui",)
_STATUS = re.compile(r"(^|[/:])(status_?bar\w*|clock|battery)$")
_EDITABLE = re.compile(r"(edittext|textbox|searchbox|textarea|textfield|entry|autocompletetextview|input)$")
_PREFIX = re.compile(r"^\{.*\}|^[a-z]+:(?=[A-Za-z])")
_OFF = frozenset(("", "false", "none", "null"))


def ui_key(tree: str) -> str | None:
    """Equal for trees that show the same; None where the tree says too little (rule 4)."""
    if len(tree) > MAX_TREE:
        return None
    try:
        nodes = list(_read(tree))
    except (ValueError, ElementTree.ParseError, RecursionError):
        return None
    digest = hashlib.blake2b(digest_size=16)
    telling = 0
    hidden: int | None = None
    for depth, node in nodes:
        if hidden is not None and depth > hidden:
            continue
        hidden = depth if _runs_by_itself(node) else None
        if hidden is not None:
            continue
        kept = _kept(node)
        telling += any(name in _WORDS and value for name, value in kept)
        digest.update(json.dumps(kept, separators=(",", ":")).encode())
    return digest.hexdigest() if telling >= _LEAST else None


def _read(tree: str) -> Iterator[_Node]:
    text = tree.strip()
    if text.startswith("<"):
        if "<!DOCTYPE" in text[:4096] or "<!ENTITY" in text:  # nothing that a tree needs, and a way to fill the memory
            raise ValueError("a UI tree with a document type")
        return _of_xml(ElementTree.fromstring(text), 0)
    if text.startswith(("{", "[")):
        return _of_json(json.loads(text), 0)
    return ((len(line) - len(line.lstrip()), {"text": line.strip()}) for line in text.splitlines() if line.strip())


def _of_xml(element: ElementTree.Element, depth: int) -> Iterator[_Node]:
    node = {_plain(name): value.strip() for name, value in element.attrib.items()}
    node["tag"] = _plain(element.tag)
    if element.text and element.text.strip():
        node["words"] = element.text.strip()
    yield depth, node
    for child in element:
        yield from _of_xml(child, depth + 1)


def _of_json(value: Any, depth: int) -> Iterator[_Node]:
    """An object is a node; what it holds as objects are its attributes when they wrap one value, else its children."""
    if isinstance(value, list):
        for item in value:
            yield from _of_json(item, depth)
        return
    if not isinstance(value, Mapping):
        yield depth, {"text": _words(value)}
        return
    node: dict[str, str] = {}
    below: list[Any] = []
    for name, item in value.items():
        plain = _plain(str(name))
        if plain in _PLACES or plain in _NUMBERS:
            continue
        if isinstance(item, Mapping) and "value" in item:
            item = item["value"]
        if isinstance(item, Mapping) or (isinstance(item, list) and any(isinstance(i, Mapping) for i in item)):
            below.append(item)
        else:
            node[plain] = _words(item)
    yield depth, node
    for item in below:
        yield from _of_json(item, depth + 1)


def _plain(name: str) -> str:
    """contentDescription, content-desc and {namespace}content_desc, as one writes them without."""
    return re.sub(r"[^a-z0-9]", "", _PREFIX.sub("", name).lower())


def _words(value: Any) -> str:
    return value.strip() if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _runs_by_itself(node: Mapping[str, str]) -> bool:
    if node.get("package", node.get("packagename", "")) in _SYSTEM:
        return True
    name = node.get("resourceid") or node.get("resourcename") or node.get("viewidresourcename") or ""
    if name.startswith("com.android.systemui:") or _STATUS.search(name.lower()):
        return True
    return any(node.get(role, "").rpartition(".")[2].lower() in _RUNNING for role in _ROLES)


def _kept(node: Mapping[str, str]) -> list[tuple[str, str]]:
    editable = node.get("editable", node.get("iseditable", "")).lower() == "true" or any(
        _EDITABLE.search(node.get(role, "").lower()) for role in _ROLES
    )
    return sorted(
        (name, value)
        for name, value in node.items()
        if name not in _PLACES
        and name not in _NUMBERS
        and name not in _CARET
        and (editable or name not in _FOCUS)
        and value.lower() not in _OFF
    )
