"""An evaluator of the part of CEL that the rules use; a rule that uses more fails here and has to extend it."""

import re
from collections.abc import Callable
from typing import Any

Scope = dict[str, Any]
Term = Callable[[Scope], Any]
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|r?'(?P<text>[^']*)'|(?P<name>[A-Za-z_]\w*)|(?P<sign>&&|\|\||[=!<>]=|[-+*!<>?:.,()\[\]]))"
)
_ABSENT = object()


def either_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) or b(s)


def both_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) and b(s)


def sum_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) + b(s)


def product_of(a: Term, b: Term) -> Term:
    return lambda s: a(s) * b(s)


def member_of(owner: Term, name: str) -> Term:
    return lambda s: owner(s).get(name, _ABSENT)


def quantified(name: str, items: Term, variable: str, body: Term) -> Term:
    """Over the items of a list, or the keys of a map."""

    def hits(s: Scope) -> list[bool]:
        return [bool(body({**s, variable: item})) for item in items(s)]

    decided: dict[str, Callable[[list[bool]], bool]] = {"all": all, "exists": any, "exists_one": lambda h: sum(h) == 1}
    return lambda s: decided[name](hits(s))


class Cel:
    """Recursive descent over one expression; `Cel(text)(scope)` evaluates it."""

    def __init__(self, text: str):
        self.tokens = [(m.lastgroup or "", m[m.lastgroup or 0]) for m in _TOKEN.finditer(text)]
        assert "".join(t.replace(" ", "") for _, t in self.tokens) == re.sub(r"\br(?=')|[\s']", "", text), (
            f"not read whole: {text}"
        )
        self.term = self.ternary()
        assert not self.tokens, f"left over: {self.tokens}"

    def __call__(self, scope: Scope) -> Any:
        return self.term(scope)

    def take(self, *signs: str) -> str:
        if self.tokens and self.tokens[0][1] in signs and self.tokens[0][0] in ("sign", "name"):
            return self.tokens.pop(0)[1]
        return ""

    def must(self, sign: str) -> None:
        assert self.take(sign), f"expected {sign}, not {self.tokens[:1]}"

    def ternary(self) -> Term:
        test = self.either()
        if not self.take("?"):
            return test
        yes = self.ternary()
        self.must(":")
        no = self.ternary()
        return lambda s: yes(s) if test(s) else no(s)

    def either(self) -> Term:
        left = self.both()
        while self.take("||"):
            left = either_of(left, self.both())
        return left

    def both(self) -> Term:
        left = self.relation()
        while self.take("&&"):
            left = both_of(left, self.relation())
        return left

    def relation(self) -> Term:
        left = self.total()
        sign = self.take("==", "!=", "<=", "<", "in")
        if not sign:
            return left
        right = self.total()
        compare: dict[str, Callable[[Any, Any], bool]] = {
            "==": lambda a, b: bool(a == b),
            "!=": lambda a, b: bool(a != b),
            "<=": lambda a, b: bool(a <= b),
            "<": lambda a, b: bool(a < b),
            "in": lambda a, b: a in b,
        }
        return lambda s: compare[sign](left(s), right(s))

    def total(self) -> Term:
        left = self.product()
        while self.take("+"):
            left = sum_of(left, self.product())
        return left

    def product(self) -> Term:
        left = self.single()
        while self.take("*"):
            left = product_of(left, self.single())
        return left

    def single(self) -> Term:
        if self.take("!"):
            inner = self.single()
            return lambda s: not inner(s)
        if self.take("("):
            inner = self.ternary()
            self.must(")")
            return inner
        if self.take("["):
            items = [self.ternary()]
            while self.take(","):
                items.append(self.ternary())
            self.must("]")
            return lambda s: [item(s) for item in items]
        kind, token = self.tokens.pop(0)
        if kind in ("number", "text"):
            value: Any = token if kind == "text" else float(token) if "." in token else int(token)
            return lambda s: value
        assert kind == "name", f"unexpected {token}"
        if token in ("has", "type", "size"):
            self.must("(")
            inner = self.ternary()
            self.must(")")
            functions: dict[str, Callable[[Any], Any]] = {
                "has": lambda value: value is not _ABSENT,
                "type": lambda value: type(value).__name__,
                "size": len,
            }
            return lambda s: functions[token](inner(s))
        return self.members(lambda s: token if token == "int" else s[token])

    def members(self, term: Term) -> Term:
        while self.take("."):
            name = self.tokens.pop(0)[1]
            if name in ("exists_one", "exists", "all"):
                self.must("(")
                variable = self.tokens.pop(0)[1]
                self.must(",")
                body = self.ternary()
                self.must(")")
                return quantified(name, term, variable, body)
            if name in ("startsWith", "matches"):
                self.must("(")
                argument = self.ternary()
                self.must(")")
                test = str.startswith if name == "startsWith" else lambda text, pattern: bool(re.search(pattern, text))
                return lambda s, t=term: test(t(s), argument(s))
            term = member_of(term, name)
        return term


def without_nulls(value: Any) -> Any:
    """As CEL sees it: a null field is absent."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
