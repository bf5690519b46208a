"""What every part of the API is made of.

Promises:
1. A field is written once: name, unit (in the description), default, bounds. YAML is camelCase, Python snake_case.
2. Unknown fields are errors, objects are frozen, every list and every string is bounded. What another release wrote
   is read leniently (`reading.py`).
3. A rule between fields is written once, as a `Rule` in the class's `rules`. It is checked here and written into the
   CRD as CEL, so the laptop and the cluster refuse the same files.
4. What an update may not do is written once, as a `Change` in the class's `changes`: the API server refuses it, and
   `forbidden_changes` says the same here.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

API_VERSION: Final = "tapforge.dev/v1alpha1"
GROUP, VERSION = API_VERSION.split("/")
#: on a run as the operator resolved it: digest of the Pod templates that it was started with, which are not in it
POD_TEMPLATES_ANNOTATION = f"{GROUP}/pod-templates"

INT32 = 2**31 - 1

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

#: a name that can be part of a Pod's host name
DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]


@dataclass(frozen=True, slots=True)
class LocalPath:
    """Marks a field that names a file or folder of the machine that carries the object out."""


#: the longest path that Linux takes
Path = Annotated[str, Field(min_length=1, max_length=4096), LocalPath()]
#: printable ASCII, as a URL is on the wire: engines of regular expressions differ in what a blank is
Url = Annotated[str, Field(min_length=8, max_length=2048, pattern=r"^https?://[!-.0-~][!-~]*$")]
#: of object storage, as fsspec takes it
Uri = Annotated[str, Field(min_length=6, max_length=2048, pattern=r"^[a-z][a-z0-9+.-]*://[!-~]+$")]
#: HOST:PORT as `adb connect` takes it; an address of IPv6 in brackets
_AUTHORITY: Final = r"([A-Za-z0-9][-A-Za-z0-9.]*|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"
#: a URL, or HOST:PORT of a server that doesn't speak HTTP
ADDRESS: Final = rf"^(https?://[!-.0-~][!-~]*|{_AUTHORITY})$"
Address = Annotated[str, Field(min_length=3, max_length=2048, pattern=ADDRESS)]
#: an `Address`, or a device as adb names it: its serial, or `auto` for all that are attached
DEVICE: Final = rf"^(https?://[!-.0-~][!-~]*|{_AUTHORITY}|[A-Za-z0-9][-A-Za-z0-9._]*)$"
Device = Annotated[str, Field(min_length=1, max_length=2048, pattern=DEVICE)]
#: names of tasks, suites, adapters: short, printable, without blanks
Word = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]

Seed = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Positive = Annotated[int, Field(ge=1, le=INT32)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Unique(AfterValidator):
    """A list of which no item is there twice: here an error, on the API server a list of type "set"."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core), "x-kubernetes-list-type": "set"}


def _each_once(items: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = [item for item, count in Counter(items).items() if count > 1]
    if twice:
        raise ValueError(f"is there more than once: {', '.join(map(str, twice[:5]))}")
    return items


UNIQUE = _Unique(_each_once)


@dataclass(frozen=True, slots=True)
class Keyed:
    """A list of structs of which no two have the same value in one field: the API server merges them by it."""

    field: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(core), "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [to_camel(self.field)]}

    def _check(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        _each_once(tuple(getattr(item, self.field) for item in items))
        return items


#: context of a validation that takes what another release wrote
LENIENT: Final = "lenient"


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A closed list of words that a later release may lengthen. Read leniently, a word of a later release counts as
    `word`: the one of ours that is safe whatever was meant."""

    word: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._read, handler(source))

    def _read(self, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        try:
            return handler(value)
        except ValidationError:
            if info.context is LENIENT and isinstance(value, str):
                return self.word
            raise


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on one object: `holds` for Python, `cel` for the API server, `message` for the person."""

    message: str
    cel: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Change:
    """A condition on an update of one object: `holds(old, new)` for Python, `cel` (with `oldSelf`) for the API server.
    `at` is the field that the refusal names, from this struct on."""

    message: str
    cel: str
    holds: Callable[[Any, Any], bool]
    at: str


_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {"<": operator.lt, "<=": operator.le}


def camel(path: str) -> str:
    """`learner.mini_batches` -> `learner.miniBatches`."""
    return ".".join(to_camel(part) for part in path.split("."))


def compare(left: str, sign: str, right: str, why: str) -> Rule:
    """A rule `left < right` or `left <= right` between numbers that are always there (they have defaults)."""
    of_left, of_right, test = operator.attrgetter(left), operator.attrgetter(right), _COMPARE[sign]
    return Rule(
        message=f"{camel(left)} must be {sign} {camel(right)}: {why}",
        cel=f"self.{camel(left)} {sign} self.{camel(right)}",
        holds=lambda o: test(of_left(o), of_right(o)),
    )


def exactly_one_of(*names: str) -> Rule:
    """A rule that one and only one of the optional fields is there."""
    counts = " + ".join(f"(has(self.{camel(n)}) ? 1 : 0)" for n in names)
    listed = ", ".join(camel(n) for n in names)
    return Rule(
        message=f"exactly one of {listed} must be set",
        cel=f"{counts} == 1",
        holds=lambda o: sum(getattr(o, n) is not None for n in names) == 1,
    )


def not_both(one: str, other: str, why: str) -> Rule:
    """A rule that at most one of two optional fields is there."""
    return Rule(
        message=f"{camel(one)} and {camel(other)} must not both be set: {why}",
        cel=f"!(has(self.{camel(one)}) && has(self.{camel(other)}))",
        holds=lambda o: getattr(o, one) is None or getattr(o, other) is None,
    )


def fixed(name: str, why: str) -> Change:
    """A field that keeps its value as long as the object lives."""
    return Change(
        message=f"can't be changed: {why}",
        cel=f"self.{camel(name)} == oldSelf.{camel(name)}",
        holds=lambda old, new: bool(getattr(old, name) == getattr(new, name)),
        at=camel(name),
    )


class Spec(BaseModel):
    """Base of every struct in the API."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    changes: ClassVar[tuple[Change, ...]] = ()

    @model_validator(mode="after")
    def _obey_rules(self) -> Self:
        broken = [rule.message for rule in self.rules if not rule.holds(self)]
        if broken:
            raise ValueError("; ".join(broken))
        return self


class OneOf(Spec):
    """A struct of which exactly one member is set: the API's way to say "or".

    `kind` is the member's attribute name, `value` the member itself.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.rules = (exactly_one_of(*cls.model_fields),)

    @property
    def kind(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def value(self) -> Any:
        return getattr(self, self.kind)


# --- what every kind has ----------------------------------------------------------------------------------------------

LABEL_VALUE: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
#: a name of at most 63 letters with an optional DNS prefix, such as `example.com/team`
QUALIFIED_NAME: Final = rf"^({_SUBDOMAIN}/)?{LABEL_VALUE}$"
_QUALIFIED_LENGTH = 253 + 1 + 63

Labels = Annotated[
    dict[str, Annotated[str, Field(max_length=63, pattern=rf"^({LABEL_VALUE})?$")]], Field(max_length=64)
]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=262_144)]], Field(max_length=64)]


def qualified_keys(field: str) -> Rule:
    """A map of labels or annotations, as far as its keys go: a schema can say nothing of keys."""
    return Rule(
        message=f"{field} must have names as keys that are [DNS-PREFIX/]NAME, as in example.com/team",
        cel=f"self.{field}.all(k, size(k) <= {_QUALIFIED_LENGTH} && k.matches(r'{QUALIFIED_NAME}'))",
        holds=lambda o: all(
            len(k) <= _QUALIFIED_LENGTH and re.fullmatch(QUALIFIED_NAME[1:-1], k) for k in getattr(o, field)
        ),
    )


class Metadata(Spec):
    """Name, namespace and labels of an object, as everywhere in Kubernetes."""

    name: DnsLabel = Field(description="name of the object, unique for its kind in the namespace")
    namespace: DnsLabel | None = Field(None, description="namespace; without one the context's. Unused on a laptop")
    labels: Labels = Field({}, description="labels: short values that can be selected by")
    annotations: Annotations = Field({}, description="annotations: notes that can't be selected by")

    rules: ClassVar[tuple[Rule, ...]] = (qualified_keys("labels"), qualified_keys("annotations"))


class Condition(Spec):
    """One aspect of an object's state, in the form that `kubectl wait` and GitOps tools read."""

    type: Word = Field(description="which aspect: Ready, Reconciling, Stalled, ...")
    status: Annotated[str, Field(max_length=7, pattern="^(True|False|Unknown)$")] = Field(
        description="True, False or Unknown"
    )
    reason: Annotated[str, Field(max_length=128)] = Field("", description="why, as one word for programs")
    message: Annotated[str, Field(max_length=4096)] = Field("", description="why, as a sentence for people")
    last_transition_time: Annotated[str, Field(max_length=40)] = Field(
        "", description="when the status last changed (RFC 3339)"
    )
    observed_generation: Count = Field(0, description="metadata.generation that this condition speaks of")


#: one condition per type
Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), Keyed("type")]
