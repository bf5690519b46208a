"""`make test` and `make test-long`: jobs that run beside each other as far as two cores allow, and one report of all.

    python -m tests.tiers test | test-long

- A job begins when those that it comes after have ended, well or not; a failed job stops no other one.
- What has to be built is built first: meanwhile lint and the tests that start no Ray, cluster or compiler run, and
  nothing else.
- Jobs that start Ray, engines and learners come one after the other: each fills the machine. What waits most of its
  time runs beside them. (The real node beside the stacks saves four minutes, and a run of its own comes too late then.)
- The tests that start nothing run from the first moment on, as two jobs, at a low priority: they take what the others
  leave of both cores, and slow nothing down that has a deadline.
- Each job writes a log of its own. A line now and then says how far they are and what is waited for.
- The last lines name what failed, where the log is, and how to repeat it. The exit code is 1 then.
- Ctrl-C, SIGTERM and SIGHUP end every job, and so do `LIMIT` seconds: what has not ended by then has failed.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

LOGS: Final = Path("test-logs")
#: for all jobs together, seconds
LIMIT: Final = 4500.0
_REPORT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.2
#: after which a job that was told to end is killed, seconds
_GRACE: Final = 60.0
#: lines of a log that a failed job shows
_SHOWN: Final = 100

#: folders whose tests start Ray, engines and learners
STACKS: Final = ("tests/run", "tests/policy", "tests/families")
#: folders whose tests need something that is built, or a Ray alone, and wait most of their time
DRIVERS: Final = ("tests/driver", "tests/gitops")
SHORT, LONG = "not long and not width", "long"


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    #: names of jobs that end before
    after: tuple[str, ...] = ()
    #: what it gives way to others by, as `nice` counts
    niceness: int = 0


def _pytest(name: str, *words: str, only: str, after: Sequence[str] = (), niceness: int = 0) -> Job:
    cache = f"cache_dir=.pytest_cache/{name.replace(' ', '-')}"
    command = (sys.executable, "-u", "-m", "pytest", "-v", "-o", cache, *words, "-m", only)
    return Job(name, command, tuple(after), niceness)


BUILDS: Final = Job("builds", (sys.executable, "-u", "-m", "e2e.builds"))
LONG_BUILDS: Final = Job("builds", (*BUILDS.command, "long"))
#: about half of the tests that start nothing, by the CPU time that they take; the others are wherever else
_LEARNING: Final = tuple(
    f"tests/{name}"
    for name in ("agents", "algorithms", "batch", "loop", "memory", "model_source", "recording", "rollout", "storage")
)
_NO_OTHERS: Final = tuple(f"--ignore={folder}" for folder in ("tests/e2e", *STACKS, *DRIVERS, *_LEARNING))
_PURE: Final = {"learning": _LEARNING, "pure": _NO_OTHERS}
_NICENESS: Final = 10
#: parts of the control plane's tests, which wait most of their time: each part has a control plane of its own
_BROKERS: Final = ("tests/e2e/test_claim*.py", "tests/e2e/test_operator_*.py")
#: in these the API server is away for minutes
_OUTAGE: Final = "tests/e2e/test_outage.py"
_PARTS: Final = {
    "claims": tuple(str(path) for pattern in _BROKERS for path in sorted(Path().glob(pattern))),
    "control plane": ("tests/e2e", f"--ignore={_OUTAGE}", *(f"--ignore-glob={pattern}" for pattern in _BROKERS)),
    "outage": (_OUTAGE,),
}


def _control_plane(only: str, *parts: str, after: str = "builds") -> list[Job]:
    return [_pytest(name, *_PARTS[name], only=f"not node and {only}", after=[after]) for name in parts]


def _pure(only: str) -> list[Job]:
    return [_pytest(name, *words, only=only, niceness=_NICENESS) for name, words in _PURE.items()]


TIERS: Final[Mapping[str, tuple[Job, ...]]] = {
    "test": (
        BUILDS,
        Job("lint", ("make", "lint")),
        _pytest("stacks", *STACKS, only=SHORT, after=["builds"]),
        _pytest("drivers", *DRIVERS, only=SHORT, after=["builds"]),
        *_control_plane(SHORT, "claims", "control plane"),
        *_pure(SHORT),
        _pytest("node", "tests/e2e", only=f"node and {SHORT}", after=["stacks"]),
    ),
    "test-long": (
        LONG_BUILDS,
        _pytest("stacks", *STACKS, only=LONG, after=["builds"]),
        *_control_plane(LONG, "claims", "control plane"),
        # It waits for most of its time: a third control plane has not to start beside two others and Ray.
        *_control_plane(LONG, "outage", after="claims"),
        _pytest("drivers", *DRIVERS, only=LONG, after=["claims"]),
        *_pure(LONG),
        _pytest("node", "tests/e2e", only=f"node and {LONG}", after=["stacks"]),
    ),
}


# --- what a log says --------------------------------------------------------------------------------------------------

_CLOSING = re.compile(
    r"^=+ (.*(?:passed|failed|error|skipped|deselected|no tests ran).*) in [\d.]+s.*=+$", re.MULTILINE
)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed)")
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_SKIPPED = re.compile(r"^SKIPPED \[\d+\] .*$", re.MULTILINE)


@dataclass(frozen=True)
class Said:
    """What a job's log says by its end."""

    counts: Mapping[str, int]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]
    #: the last lines, from the first failure on where there is one
    shown: str


def read(log: str) -> Said:
    closing = _CLOSING.findall(log)
    counts = {word.removesuffix("s"): int(number) for number, word in _COUNT.findall(closing[-1] if closing else "")}
    begin = re.search(r"^=+ (?:FAILURES|ERRORS) =+$", log, re.MULTILINE)
    lines = log[begin.start() if begin else 0 :].splitlines()
    return Said(
        counts,
        tuple(dict.fromkeys(_SUMMARY.findall(log))),
        tuple(_SKIPPED.findall(log)),
        "\n".join(lines[-_SHOWN:]),
    )


def how_far(log: str) -> str:
    """Where a job is: its share of the tests and the one that runs, or the last line."""
    lines = log.splitlines()
    last = lines[-1].strip() if lines else "begins"
    done = re.findall(r"\[ *(\d+)%\]$", log, re.MULTILINE)
    return f"{done[-1]} %, {last}" if done else last


def repeat(name: str) -> str:
    """The command that runs a test again, as a shell and then make take it."""
    return f"make test {shlex.quote('ARGS=' + shlex.quote(name).replace('$', '$$'))}"


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    job: Job
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    #: what it and those that it waited for took, seconds; once it has ended
    cpu: float = 0.0

    def has_ended(self) -> bool:
        before = _children_cpu()
        if self.process.poll() is None:
            return False
        self.cpu = _children_cpu() - before
        return True

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tell(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # nobody of it is left
            os.killpg(self.process.pid, number)


@dataclass
class End:
    """That somebody asked for the end."""

    asked: bool = False

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        self.asked = True


@dataclass(frozen=True)
class Ran:
    """What became of the jobs."""

    started: tuple[_Running, ...]
    #: why jobs were ended or never began; empty: they all came to their end
    cut: str = ""
    #: ended for that reason, with how far they were
    unfinished: Mapping[str, str] = field(default_factory=dict)
    never_began: tuple[str, ...] = ()


def _say(line: str) -> None:
    print(f"test: {line}", flush=True)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _begin(job: Job, folder: Path) -> _Running:
    log = folder / f"{job.name.replace(' ', '-')}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            ("nice", "-n", str(job.niceness), *job.command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            # A property's random examples are for people who look for them (conftest.py), not for whoever waits.
            env={**os.environ, "TAPFORGE_SAME_EXAMPLES": "1"},
            # A group and no session of its own: Linux weighs priorities inside a session only.
            process_group=0,
        )
    return _Running(job, log, process)


def _end(running: Sequence[_Running], end: End) -> None:
    """All of them, as Ctrl-C would; whoever is deaf is killed, at once when the end is asked for once more."""
    end.asked = False
    for one in running:
        one.tell(signal.SIGINT)
    deadline = time.monotonic() + _GRACE
    while any(one.process.poll() is None for one in running) and time.monotonic() < deadline and not end.asked:
        time.sleep(_LOOK_SECONDS)
    for one in running:
        one.tell(signal.SIGKILL)
        one.process.wait(_GRACE)


def ready(waiting: Sequence[Job], under_way: Sequence[str]) -> list[Job]:
    """Jobs that may begin, of those that wait, while jobs of these names have not ended."""
    not_ended = {job.name for job in waiting} | set(under_way)
    return [job for job in waiting if not not_ended.intersection(job.after)]


def run(jobs: Sequence[Job], folder: Path, end: End) -> Ran:
    """Runs them all, until they ended, the end is asked for, or `LIMIT` seconds are over."""
    began = told = time.monotonic()
    waiting, started = list(jobs), list[_Running]()
    cut = ""
    while not cut and (waiting or any(one.ended is None for one in started)):
        for one in [one for one in started if one.ended is None]:
            if one.has_ended():
                one.ended = time.monotonic()
                result = "passed" if one.process.returncode == 0 else f"FAILED, {one.log} says more"
                closing = _CLOSING.findall(one.text())
                figures = f": {closing[-1]}" if closing else ""
                took = f"{one.ended - one.began:.0f} s, {one.cpu:.0f} s of a core"
                _say(f"{one.ended - began:5.0f} s  {one.job.name} {result}{figures}, {took}")
        for job in ready(waiting, [one.job.name for one in started if one.ended is None]):
            waiting.remove(job)
            started.append(_begin(job, folder))
            _say(f"{time.monotonic() - began:5.0f} s  {job.name} begins: {started[-1].log}")
        if time.monotonic() - told > _REPORT_SECONDS:
            told = time.monotonic()
            for one in started:
                if one.ended is None:
                    _say(f"{told - began:5.0f} s  {one.job.name}: {how_far(one.text())}")
        if end.asked:
            cut = "given up"
        elif time.monotonic() - began > LIMIT:
            cut = f"not done after {LIMIT:.0f} s"
        time.sleep(_LOOK_SECONDS)
    rest = [one for one in started if one.ended is None]
    unfinished = {one.job.name: how_far(one.text()) for one in rest}
    _end(rest, end)
    return Ran(tuple(started), cut, unfinished, tuple(job.name for job in waiting))


def report(ran: Ran) -> int:
    """Prints what came of it; returns the exit code. A job that failed and names no test counts as one failure."""
    said = {one.job.name: read(one.text()) for one in ran.started}
    broken = [one for one in ran.started if one.job.name not in ran.unfinished and one.process.returncode != 0]
    for one in broken:
        print(f"\n{'=' * 40} {one.job.name}: {one.log}\n{said[one.job.name].shown}")
    lines = [line for name in said for line in said[name].skipped]
    wrong = 0
    for one in ran.started:
        failed, name = said[one.job.name].failed, one.job.name
        lines += [f"FAILED {test}, in {one.log}; again: {repeat(test)}" for test in failed]
        wrong += len(failed)
        if name in ran.unfinished:
            lines.append(f"FAILED {name}: {ran.cut} at {ran.unfinished[name]}; {one.log} says more")
            wrong += 1
        elif one in broken and not failed:
            lines.append(f"FAILED {name} ended with {one.process.returncode}; {one.log} says more")
            wrong += 1
    lines += [f"FAILED {name}: {ran.cut} before it began" for name in ran.never_began]
    wrong += len(ran.never_began)
    for line in lines:
        _say(line)
    passed, skipped = (sum(one.counts.get(word, 0) for one in said.values()) for word in ("passed", "skipped"))
    print(f"{passed} passed, {wrong} failed, {skipped} skipped", flush=True)
    return 1 if wrong or ran.cut else 0


def main(words: Sequence[str]) -> int:
    if len(words) != 1 or words[0] not in TIERS:
        print(f"usage: python -m tests.tiers {' | '.join(TIERS)}", file=sys.stderr)
        return 2
    end = End()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end.ask)
    folder = LOGS / words[0]
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    ran = run(TIERS[words[0]], folder, end)
    code = report(ran)
    _say(f"{ran.cut or ('failed' if code else 'passed')} after {time.monotonic() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
