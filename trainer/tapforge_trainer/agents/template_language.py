"""The language of chat templates: Jinja in a sandbox that writes nothing, with all that transformers adds to it.

- `tojson` with its options: nothing is escaped for HTML, keys stay in their order unless `sort_keys` is given.
- `{% generation %} ... {% endgeneration %}`, which training tools put around what a model said, writes what is inside.
- `strftime_now(format)` is the local time at which the template was compiled: prompts of an episode that goes on over
  midnight begin alike.
- `raise_exception(message)`, and `{% break %}` and `{% continue %}` in loops.

jinja2 is imported here when a template is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn


def as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson`. The order of its options is transformers'."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compiled(template: str) -> Any:
    """A jinja2.Template. Raises jinja2.TemplateError."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        # A call of what is inside, as in transformers: variables that are set there are unknown behind it.
        tags = {"generation"}  # noqa: RUF012 - Jinja's own form

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], inside).set_lineno(line)

        def _written(self, caller: Callable[[], str]) -> str:
            return caller()

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    now = datetime.now().astimezone().replace(tzinfo=None)
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now.strftime
    return environment.from_string(template)
