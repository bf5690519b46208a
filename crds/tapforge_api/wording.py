"""What a value that can't be read should have been, in a person's words: the rule of a form, the unit of a number.

- `rule_of(pattern)`: what a regular expression of the API asks for, with an example. Every one has words here.
- `number_meant(name, text)`: the number that a text with a unit means in the unit of the field (`maxSeconds: 10m` is
  600). The unit is the end of the field's name. What is ambiguous is not guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from .base import ADDRESS, DEVICE, DNS_LABEL, LABEL_VALUE

_NAME: Final = "lower-case letters, digits and - (first and last a letter or digit)"
_HTTP: Final = "a URL that begins with http:// or https://, without blanks"

#: regular expression -> (what it asks for, an example)
RULES: Final[Mapping[str, tuple[str, str]]] = {
    DNS_LABEL: (_NAME, "my-run"),
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": (f"{_NAME}, beginning with a letter", "workers-a"),
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": (
        "lower-case letters, digits, - and . (first and last none of these two)",
        "my-claim",
    ),
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*$": ("letters, digits, and . _ / - after the first one, without blanks", "qwen3-vl"),
    r"^[A-Za-z0-9_][A-Za-z0-9._/-]*$": ("a relative path of letters, digits and . _ / -", "team/runs"),
    r"^[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z][A-Za-z0-9_]*)+$": ("a package, with dots", "com.android.settings"),
    r"^[a-z][a-z0-9+.-]*://[!-~]+$": ("SCHEME://PLACE without blanks", "s3://bucket/folder"),
    r"^[!-~]+$": ("an image without blanks", "registry.example.com/team/image:tag"),
    r"^[0-9]+\.[0-9]+\.[0-9]+[a-z0-9.+-]*$": ("a version of three numbers, as text", '"2.52.0"'),
    r"^[A-Za-z0-9@./][!-~]*$": ("the name of a model, without blanks", "Qwen/Qwen2.5-VL-32B-Instruct"),
    r"^[A-Za-z_][A-Za-z0-9_]*$": ("the name of an environment variable", "JUDGE_API_KEY"),
    r"^(True|False|Unknown)$": ("True, False or Unknown", "True"),
    r"^/[!-~]*$": ("a path that begins with /, without blanks", "/health"),
    r"^[a-z][A-Za-z0-9_]*$": ("letters, digits and _, beginning with a lower-case letter", "judge"),
    r"^https?://[!-.0-~][!-~]*$": (_HTTP, "http://10.0.0.7:8000/v1"),
    ADDRESS: (f"{_HTTP}, or HOST:PORT", "http://10.0.0.7:8000"),
    DEVICE: (f"{_HTTP}, HOST:PORT, a serial or auto", "emulator-5554"),
    r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$": ("OWNER/NAME", "Qwen/Qwen3-VL-8B-Instruct"),
    r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$": ("DOMAIN/NAME", "devices.example.com/kvm"),
    rf"^({LABEL_VALUE})?$": (
        "at most 63 letters, digits and - _ . (first and last a letter or digit), or nothing",
        "team-a",
    ),
    "^Never$": ("Never", "Never"),
    r"^(100|[0-9]{1,2})%$": ("a percentage of at most 100%", "10%"),
}

_NUMBER: Final = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%µ]*)\s*")
_THOUSANDS: Final = re.compile(r"[0-9]{1,3}(?:[,_][0-9]{3})+(?:\.[0-9]+)?")
_SECONDS: Final[Mapping[str, float]] = {
    "ms": 0.001,
    "s": 1,
    "sec": 1,
    "secs": 1,
    "second": 1,
    "seconds": 1,
    "m": 60,
    "min": 60,
    "mins": 60,
    "minute": 60,
    "minutes": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "hours": 3600,
    "d": 86_400,
    "day": 86_400,
    "days": 86_400,
}
_BYTES: Final[Mapping[str, float]] = {
    "b": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")},
    **{f"{letter}i{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("", "b")},
}
_MULTIPLES: Final[Mapping[str, float]] = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
#: end of a field's name -> (unit in words, how many of `_SECONDS` or `_BYTES` are one)
_UNITS: Final = (
    ("seconds", "seconds", _SECONDS, 1),
    ("gib", "GiB", _BYTES, 2**30),
    ("mib", "MiB", _BYTES, 2**20),
)


def number_meant(name: str, text: str) -> str:
    """How the number is written that `text` means in a field of this name, in words; "": it means none, or several."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return ""
    digits, unit = match[1], match[2].lower()
    if re.search("[,_]", digits) and not _THOUSANDS.fullmatch(digits):
        return ""
    amount = float(re.sub("[,_]", "", digits))
    for end, words, units, one in _UNITS:
        if name.lower().endswith(end):
            if not unit:
                return f"a number of {words} without quotes: {_written(amount)}"
            if unit in units:
                return f"in {words}, without a unit: {_written(amount * units[unit] / one)}"
            return f"in {words}, without a unit"
    if unit == "%":
        return f"a share of 1: {_written(amount / 100)}"
    if unit in _MULTIPLES:
        return f"written out: {_written(amount * _MULTIPLES[unit])}"
    return "" if unit else f"a number without quotes and commas: {_written(amount)}"


def _written(number: float) -> str:
    if not math.isfinite(number):
        return "a smaller number"
    return str(int(number)) if number == int(number) and number < 1e15 else f"{number:.6g}"


def rule_of(pattern: str, value: str = "") -> str:
    """Of a regular expression of the API; the expression itself where another package's has no words. A `value` that
    would be a name in small letters is the example."""
    if pattern not in RULES:
        return f"text of the form {pattern}"
    words, example = RULES[pattern]
    small = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", value).lower()).strip("-")
    if words.startswith(_NAME) and re.fullmatch(pattern.removeprefix("^").removesuffix("$"), small):
        example = small
    return f"{words}, such as {example}"
