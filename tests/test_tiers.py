"""Both tiers together play every test once, and what a job's log says is read as it is meant."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests import tiers

ROOT = Path(__file__).parents[1]
LONG = re.compile(r"^(?:@|pytestmark = )pytest\.mark\.long$", re.MULTILINE)
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))


def _takes(job: tiers.Job, file: str) -> bool:
    """Whether pytest would look at a file for this job."""
    words = [word for word in job.command if word.startswith(("tests/", "--ignore"))]
    paths = [word for word in words if word.startswith("tests/")] or ["tests"]
    ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore")]
    return any(Path(file).is_relative_to(path) for path in paths) and not any(
        Path(file).is_relative_to(path) or fnmatch(file, path) for path in ignored
    )


def _only(job: tiers.Job) -> str:
    return job.command[-1]


@pytest.mark.parametrize("file", FILES)
def test_each_test_is_played_once(file: str) -> None:
    """A file of the control plane's tests may hold some for a real node: these have a job of their own."""
    node = file.startswith("tests/e2e/")
    for tier, only in (("test", tiers.SHORT), ("test-long", tiers.LONG)):
        takes = [_only(job) for job in tiers.TIERS[tier] if "pytest" in job.command and _takes(job, file)]
        expected = sorted([f"not node and {only}", f"node and {only}"] if node else [only])
        if tier == "test" or takes or LONG.search((ROOT / file).read_text()):
            assert sorted(takes) == expected, f"{file} in {tier}"


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_jobs_come_after_jobs_that_there_are(tier: str) -> None:
    names = [job.name for job in tiers.TIERS[tier]]
    assert len(set(names)) == len(names)
    for number, job in enumerate(tiers.TIERS[tier]):
        assert set(job.after) <= set(names[:number])


LOG = """\
============================= test session starts ==============================
tests/a/test_a.py::test_x PASSED [ 33%]
tests/a/test_a.py::test_y[a b] FAILED [ 66%]
tests/a/test_a.py::test_z ERROR [100%]

==================================== ERRORS ====================================
E   no cluster
=================================== FAILURES ===================================
E   assert 1 == 2
=========================== short test summary info ============================
SKIPPED [1] tests/a/test_a.py:3: not here
FAILED tests/a/test_a.py::test_y[a b] - assert 1 == 2
ERROR tests/a/test_a.py::test_z - no cluster
============= 1 failed, 1 passed, 1 skipped, 1 error in 63.10s (0:01:03) ==============
"""


def test_a_log_is_read() -> None:
    said = tiers.read(LOG)
    assert said.counts == {"failed": 1, "passed": 1, "skipped": 1, "error": 1}
    assert said.failed == ("tests/a/test_a.py::test_y[a b]", "tests/a/test_a.py::test_z")
    assert said.skipped == ("SKIPPED [1] tests/a/test_a.py:3: not here",)
    assert said.shown.splitlines()[0].strip("= ") == "ERRORS"
    assert "test session starts" not in said.shown


def test_a_log_without_an_end_shows_its_end() -> None:
    said = tiers.read("one\ntwo\n")
    assert (dict(said.counts), said.failed, said.shown) == ({}, (), "one\ntwo")


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("", "begins"),
        ("cluster: building\ncluster: still building, 30 packages\n", "cluster: still building, 30 packages"),
        ("t.py::a PASSED [ 33%]\nt.py::b ", "33 %, t.py::b"),
    ],
)
def test_how_far_a_job_is(log: str, told: str) -> None:
    assert tiers.how_far(log) == told


def test_jobs_run_in_order_and_a_failure_is_told_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        tiers.Job("first", ("sh", "-c", f"echo first >> {tmp_path}/order; exit 1")),
        tiers.Job("second", ("sh", "-c", f"echo second >> {tmp_path}/order"), ("first",)),
    ]
    assert tiers.report(tiers.run(jobs, tmp_path)) == 1
    assert (tmp_path / "order").read_text().split() == ["first", "second"], "a failed job stops no other one"
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "0 passed, 0 failed, 0 skipped"
    assert said[-2] == f"test: FAILED first ended with 1; {tmp_path}/first.log says more"


def test_jobs_that_do_not_end_in_time_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LIMIT", 1.0)
    ended = tmp_path / "ended"
    job = tiers.Job("deaf", ("sh", "-c", f"trap 'touch {ended}; exit' INT; while :; do sleep 0.1; done"))
    with pytest.raises(TimeoutError, match="not done after 1 s"):
        tiers.run([job], tmp_path)
    assert ended.exists()
