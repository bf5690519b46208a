"""What is right, wrong and forbidden, as the models see it. The API server gets the same tables in tests/e2e."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tapforge_api import KINDS, SpecError, forbidden_changes, from_object

TABLES = Path(__file__).parent / "tables"
Entry = dict[str, Any]


def entries(name: str) -> list[Any]:
    read = yaml.safe_load((TABLES / name).read_text())
    return [pytest.param(entry, id=f"{entry['kind']}: {entry['case']}") for entry in read]


def obj(entry: Entry, spec: str = "spec", **more: Any) -> Any:
    head = {"apiVersion": "tapforge.dev/v1alpha1", "kind": entry["kind"], "metadata": {"name": entry.get("name", "x")}}
    return from_object(KINDS[entry["kind"]], {**head, "spec": entry[spec], **more})


@pytest.mark.parametrize("entry", entries("wrong.yaml"))
def test_what_is_wrong_is_refused_with_what_and_where(entry: Entry) -> None:
    with pytest.raises(SpecError) as caught:
        obj(entry)
    words = [entry[key] for key in ("where", "what", "laptop") if key in entry]
    assert any(all(word in str(problem) for word in words) for problem in caught.value.problems), str(caught.value)


@pytest.mark.parametrize("entry", entries("right.yaml"))
def test_what_is_right_is_taken(entry: Entry) -> None:
    assert obj(entry).metadata.name == entry.get("name", "x")


@pytest.mark.parametrize("entry", entries("changes.yaml"))
def test_changes(entry: Entry) -> None:
    status = {"startTime": "2026-01-01T00:00:00Z"} if entry.get("started") else {}
    refused = forbidden_changes(obj(entry, "before", status=status), obj(entry, "after", status=status))
    if "what" not in entry:
        assert not refused
    else:
        assert [str(problem) for problem in refused] == [f"{entry['where']}: {refused[0].message}"]
        assert entry["what"] in refused[0].message
