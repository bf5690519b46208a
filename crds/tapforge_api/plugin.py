"""What a file says to what it names: options by name, which the named code reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Keyed, Spec, Word


class PluginOption(Spec):
    """An option of a plugin."""

    name: Word = Field(description="name")
    value: Annotated[str, Field(max_length=4096)] = Field(description="value, as text")


PluginOptions = Annotated[tuple[PluginOption, ...], Field(max_length=64), Keyed("name")]
OPTIONS = Field((), description="options, as they are documented where it comes from")
