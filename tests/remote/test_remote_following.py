"""A run that is fetched again and again while something reads what came: until its end, and over what fails between."""

import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.fetch import Fetched
from tapforge_trainer.remote.following import SHOWN, following
from tapforge_trainer.remote.status import RunStatus


@dataclass
class Growing:
    """A run whose events.jsonl has a line more each time; the second fetch fails, and with the fifth it is complete."""

    times: int = 0
    wanted: list = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def fetch(self, to: Path, what: tuple[str, ...] = ()) -> Fetched:
        self.times += 1
        self.wanted.append(tuple(what))
        if self.times == 2:
            raise ClusterError("the API server doesn't answer")
        folder = Path(to) / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "events.jsonl").write_text("{}\n" * self.times)
        if self.times >= 5:
            self.over.set()
        return Fetched(folder, 1, 3 * self.times, None)

    def status(self) -> RunStatus:
        return RunStatus(name="run", namespace="n", uid="u", complete=self.times >= 4)


def test_what_is_new_comes_until_the_run_ends(tmp_path, caplog):
    run = Growing()
    with following(run, tmp_path, 0.02) as folder:
        assert (folder / "events.jsonl").read_text() == "{}\n"
        assert run.over.wait(60)
    assert (folder / "events.jsonl").read_text() == "{}\n" * 5 and run.times == 5
    assert set(run.wanted) == {SHOWN} and "doesn't answer; it is tried again" in caplog.text


def test_the_first_fetch_has_to_come(tmp_path):
    run = Growing(times=1)
    with pytest.raises(ClusterError, match="doesn't answer"), following(run, tmp_path, 60):
        pass
