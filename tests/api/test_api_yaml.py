"""YAML is read as Kubernetes reads it, with the line of every value, and no text can do worse than be refused."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tapforge_api.document import parse, scalar, to_yaml
from tapforge_api.errors import SpecError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("+12", 12),
        ("0x1F", 31),
        ("010", 8),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        (".inf", ".inf"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("yes", True),
        ("y", True),
        ("N", False),
        ("~", None),
        ('"3"', "3"),
        ("v1.2", "v1.2"),
        ("=", "="),
    ],
)
def test_scalars(text: str, value: object) -> None:
    assert scalar(text, "test") == value and type(scalar(text, "test")) is type(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_that_python_writes_is_a_number(number: float) -> None:
    assert math.isclose(scalar(repr(number), "test"), number, rel_tol=0, abs_tol=0)


def test_every_path_knows_its_line() -> None:
    (document,) = parse("a:\n  b:\n    - 1\n    - c: 2\n# comment\nd: {e: 1,\n    f: 2}\n", "test")
    assert document.data == {"a": {"b": [1, {"c": 2}]}, "d": {"e": 1, "f": 2}}
    assert document.lines[("a", "b", 1, "c")] == 4
    assert document.lines[("d",)] == 6 and document.lines[("d", "f")] == 7


def test_anchors_and_merges() -> None:
    (document,) = parse("x: &x {a: 1, b: 2}\nw: {<<: *x, b: 3}\nz: {<<: [{a: 7}, *x], c: 4}\n", "test")
    assert document.data["w"] == {"a": 1, "b": 3}
    assert document.data["z"] == {"a": 7, "b": 2, "c": 4}


_BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
_MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "line 2, column 1: not valid YAML: expected ',' or ']'"),
        ("a: b: c\n", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("a: 1\nb:\n\tc: 2\n", "line 3, column 1: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "line 3: a: is written twice, first in line 1"),
        ("1: a\n", 'line 1: "1" as a key is not text; quote it'),
        ("y: a\n", 'line 1: "y" as a key is not text; quote it'),
        ("on: a\n", 'line 1: "on" as a key is not text; quote it'),
        ("{[a]: b}\n", "a list or a mapping as a key is not text"),
        ("a: &a [*a]\n", "line 1: a[0]: the anchor contains itself"),
        ("a: &a {<<: *a}\n", "the anchor contains itself"),
        ("a: *b\n", "found undefined alias"),
        ("a: {<<: 3}\n", "`<<` takes a mapping"),
        ("a: !!int x\n", 'line 1: a: "x" can\'t be read as int'),
        ("a: !!python/object/apply:os.system [ls]\n", 'a: the tag "!!python/object/apply:os.system" is not supported'),
        ("a: 1\nb: \x07\n", "line 2: not valid YAML: character 7 is not allowed"),
        ("a: " + "9" * 5000 + "\n", "can't be read as int"),
        ("[" * 3000, "is nested too deeply"),
        (_BOMB, "has more than 100,000 values"),
        (_MERGE_BOMB, "has more than 100,000 values"),
        ("a: " + "x" * 1_500_000, "1,500,003 bytes, more than 1,500,000"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, "test")
    assert expected in str(caught.value)


@given(st.text(alphabet=st.sampled_from("ab1.-+:,[]{}&*!|>'\"%@`#?~<\n \t=\\e_0xo"), max_size=40))
@example("? a\n")
@example("!!set {a, b}")
@example("!!timestamp 2024-13-01")
@example("!!binary x")
@example("!!bool x")
@example("!!null x")
@example("a: \ud800")
def test_no_text_gets_past_the_reader_other_than_as_json_or_as_a_problem(text: str) -> None:
    try:
        documents = parse(text, "test")
    except SpecError as error:
        assert error.problems
        return
    assert all(_is_json(d.data) for d in documents)


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_json(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


@pytest.mark.parametrize("text", ["y", "N", "on", "09", "0x_1", "1e5", "0.1", "2024-01-01", "1:30", "~", "", "="])
def test_a_text_that_looks_like_something_else_is_written_in_quotes(text: str) -> None:
    assert to_yaml({"a": text}) == f"a: '{text}'\n"
    assert parse(to_yaml({text: text}), "test")[0].data == {text: text}
