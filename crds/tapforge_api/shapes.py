"""What may be written where: walks the models along a path of YAML's names.

Knows no instance and no value; messages, overrides and the CRD generator ask it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

#: path in a document: names and list indices
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What may be written at a path: a struct of `model`, a list, a map, a single value, or anything ("free")."""

    kind: Literal["struct", "list", "map", "value", "free"]
    model: type[BaseModel] | None = None


def shape_at(root: type[BaseModel], path: Path) -> Shape:
    """The shape at `path` below `root`; "free" below what is passed through, and where nothing is known."""
    shape, items = Shape("struct", root), Shape("free")
    for part in path:
        if shape.kind == "list":
            shape = items
        elif shape.kind == "map":
            shape = Shape("value")
        elif shape.kind == "struct" and shape.model is not None:
            fields = shape.model.model_fields.items()
            annotation = next((f.annotation for name, f in fields if part in (f.alias, name)), None)
            shape = Shape("free") if annotation is None else _shape(annotation)
            items = _items(annotation) if shape.kind == "list" else items
        else:
            return Shape("free")
    return shape


def model_at(root: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """The model of the struct at `path` below `root`, if there is one."""
    return shape_at(root, path).model


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `M`, `M | None` or `tuple[M, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := model_of(a)) is not None), None)


def _bare(annotation: Any) -> Any:
    """`X` out of `Annotated[X, ...]` and `X | None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return _bare(next(a for a in get_args(annotation) if a is not NoneType))
    return annotation


def _shape(annotation: Any) -> Shape:
    bare = _bare(annotation)
    if isinstance(bare, type) and issubclass(bare, BaseModel):
        return Shape("struct", bare)
    return Shape("list" if get_origin(bare) is tuple else "map" if get_origin(bare) is dict else "value")


def _items(annotation: Any) -> Shape:
    return _shape(get_args(_bare(annotation))[0])


def aliases(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def all_paths(model: type[BaseModel], prefix: Path = ()) -> Iterator[Path]:
    for name, field in model.model_fields.items():
        path = (*prefix, field.alias or name)
        yield path
        if (inner := model_of(field.annotation)) is not None:
            yield from all_paths(inner, path)
