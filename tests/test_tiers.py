"""Both tiers together play every test once, and what a job's log says is read as it is meant."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests import tiers

ROOT = Path(__file__).parents[1]
LONG = "mark" + ".long"
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))


@pytest.fixture(autouse=True)
def sigint_is_heard() -> Iterator[None]:
    """As `main` has it. A shell has what it starts in the background ignore SIGINT, and so would the jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    """A file of the control plane's tests may hold some for a real node: these have a job of their own. Of the first
    tier a file that is long as a whole needs no job."""
    node, text = file.startswith("tests/e2e/"), (ROOT / file).read_text()
    for tier, only in (("test", tiers.SHORT), ("test-long", tiers.LONG)):
        takes = [_only(job) for job in tiers.TIERS[tier] if "pytest" in job.command and _takes(job, file)]
        expected = sorted([f"not node and {only}", f"node and {only}"] if node else [only])
        if tier == "test" and f"\npytestmark = pytest.{LONG}\n" in text:
            assert set(takes) <= set(expected), f"{file} in {tier}"
        elif tier == "test" or takes or LONG in text:
            assert sorted(takes) == expected, f"{file} in {tier}"


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_jobs_come_after_jobs_that_there_are(tier: str) -> None:
    names = [job.name for job in tiers.TIERS[tier]]
    assert len(set(names)) == len(names)
    for number, job in enumerate(tiers.TIERS[tier]):
        assert set(job.after) <= set(names[:number])


@pytest.mark.parametrize(("under_way", "begin"), [([], ["a"]), (["builds"], ["a"]), (["a"], ["a"])])
def test_jobs_begin_after_others(under_way: list[str], begin: list[str]) -> None:
    jobs = [tiers.Job("a", ()), tiers.Job("b", (), ("a",)), tiers.Job("c", (), ("b", "builds"))]
    assert [job.name for job in tiers.ready(jobs, under_way)] == begin
    assert [job.name for job in tiers.ready(jobs[2:], under_way)] == ([] if "builds" in under_way else ["c"])


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


@pytest.mark.parametrize("name", ["tests/a.py::b", "a[b c]", "a['b\"c']", "a[$b]", "a[`b`]", "a[<b>]"])
def test_a_test_is_repeated_by_its_name(name: str, tmp_path: Path) -> None:
    """Through a shell, make, and the shell of make's recipe."""
    (tmp_path / "Makefile").write_text("test:\n\t@printf '%s\\n' $(ARGS)\n")
    done = subprocess.run(
        ["sh", "-c", tiers.repeat(name)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{name}\n"


def test_jobs_run_in_order_and_a_failure_is_told_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        tiers.Job("first", ("sh", "-c", f"sleep 1; touch {tmp_path}/first; exit 1")),
        tiers.Job("second", ("test", "-e", f"{tmp_path}/first"), ("first",)),
    ]
    ran = tiers.run(jobs, tmp_path, tiers.End())
    assert [one.process.returncode for one in ran.started] == [1, 0], "a failed job stops no other one"
    assert tiers.report(ran) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        f"test: FAILED first ended with 1; {tmp_path}/first.log says more",
        "0 passed, 1 failed, 0 skipped",
    ]


#: says that it is there, and that it heard; the deaf one hears nothing
HEARS = "trap 'touch {0}/heard; exit' INT; touch {0}/there; while :; do sleep 0.1; done"
DEAF = "trap '' INT; touch {0}/there; while :; do sleep 0.1; done"


@pytest.mark.parametrize("job", [HEARS, DEAF], ids=["hears", "deaf"])
def test_jobs_that_are_given_up_end_and_what_did_not_is_named(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_GRACE", 60.0 if job == HEARS else 1.0)
    jobs = [
        tiers.Job("one", ("sh", "-c", job.format(tmp_path))),
        tiers.Job("two", ("true",), ("one",)),
    ]
    end = tiers.End()

    def give_up() -> None:
        while not (tmp_path / "there").exists():
            time.sleep(0.05)
        end.ask()

    thread = threading.Thread(target=give_up)
    thread.start()
    ran = tiers.run(jobs, tmp_path, end)
    thread.join()
    assert (tmp_path / "heard").exists() is (job == HEARS)
    assert all(one.process.returncode is not None for one in ran.started)
    assert tiers.report(ran) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-3:] == [
        f"test: FAILED one: given up at begins; {tmp_path}/one.log says more",
        "test: FAILED two: given up before it began",
        "0 passed, 2 failed, 0 skipped",
    ]


def test_jobs_that_are_not_done_in_time_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LIMIT", 1.0)
    ran = tiers.run([tiers.Job("slow", ("sleep", "600"))], tmp_path, tiers.End())
    assert (ran.cut, dict(ran.unfinished)) == ("not done after 1 s", {"slow": "begins"})
    assert tiers.report(ran) == 1
