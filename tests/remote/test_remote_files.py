"""A run's files on their way to a laptop: what the Pod's program hands out, and the folder that comes of it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tapforge_trainer.cluster.files import listed, newest_folder
from tapforge_trainer.remote import ClusterError
from tapforge_trainer.remote.api import NotReached
from tapforge_trainer.remote.fetch import chosen, fetch_files, fetched
from tapforge_trainer.remote.target import opened

RUN, UID = "quick", "u-1"


class Pod:
    """The real program on this machine, instead of in a Pod; its connection breaks where `breaks` says."""

    def __init__(self, storage: Path):
        self.storage = storage
        #: bytes after which the connections break, one after the other
        self.breaks: list[int] = []
        self.sent = 0

    @contextmanager
    def __call__(self, words: Sequence[str]) -> Iterator[Answer]:
        environment = {**os.environ, "TAPFORGE_STORAGE": str(self.storage), "TAPFORGE_RUN": RUN}
        command = [sys.executable, "-m", "tapforge_trainer.cluster.files", *words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            limit = self.breaks.pop(0) if words[0] == "send" and self.breaks else None
            try:
                yield Answer(self, process, limit)
            finally:
                process.kill()


class Answer:
    """As `remote.api.Exec`."""

    def __init__(self, pod: Pod, process: subprocess.Popen[bytes], limit: int | None):
        self.pod, self.process, self.limit = pod, process, limit

    def write(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def readline(self) -> bytes:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise NotReached("it ended")
        return line[:-1]

    def read(self, size: int) -> bytes:
        assert self.process.stdout
        if self.limit is not None:
            if self.limit <= 0:
                raise NotReached("the connection broke")
            size = min(size, self.limit)
            self.limit -= size
        data = self.process.stdout.read(size)
        self.pod.sent += len(data)
        return data


def quiet(there: int, total: int) -> None:
    assert 0 <= there <= total


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapforge_trainer.remote.fetch._PAUSE", 0.0)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    root = tmp_path / "storage"
    for folder, update in (("attempt-00000001-1795176000000", 1), ("attempt-00000002-1795176000009", 2)):
        run = root / folder / RUN
        for path, text in {
            "spec.yaml": "kind: TrainingRun\n",
            "events.jsonl": '{"event": "update", "update": 1}\n' * update,
            "summary.json": "{}",
            "rollout/rollout-000001.jsonl": "step\n" * 50_000,
            "evaluation/before-sampled/rollout.jsonl": "step\n",
            "checkpoints/update-00000001/state.json": "{}",
            "checkpoints/update-00000002/state.json": '{"two": 2}',
            "checkpoints/update-00000002/.metadata": "m",
            "checkpoints/update-00000002/__0_0.distcp": "w" * 300_000,
            "checkpoints/latest": "update-00000002",
            "export/config.json": "{}",
            ".lock": "7",
        }.items():
            (run / path).parent.mkdir(parents=True, exist_ok=True)
            (run / path).write_text(text)
    (root / "taking-00000003-1795176000010").mkdir()
    return root


def bring(pod: Pod, folder: Path, what: Sequence[str] = (), uid: str = UID) -> dict[str, bytes]:
    with opened(folder, uid) as target:
        paths = fetch_files(pod, target, chosen(what), quiet)  # type: ignore[arg-type]
        target.publish(chosen(what), paths)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".fetched.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def run_folder(storage: Path) -> Path:
    found = newest_folder(storage, RUN)
    assert found is not None
    return found


def test_the_newest_attempt_is_listed_with_its_newest_checkpoint_only(storage: Path) -> None:
    folder = run_folder(storage)
    assert folder.parent.name == "attempt-00000002-1795176000009"
    assert [path for path, _ in listed(folder, ["checkpoint"])] == [
        "spec.yaml",
        "checkpoints/latest",
        "checkpoints/update-00000002/.metadata",
        "checkpoints/update-00000002/__0_0.distcp",
        "checkpoints/update-00000002/state.json",
        "export/config.json",
    ]
    assert dict(listed(folder, ["summary"])) == {"spec.yaml": 18, "events.jsonl": 66, "summary.json": 2}


def test_what_comes_is_what_is_there(storage: Path, tmp_path: Path) -> None:
    target = tmp_path / "runs" / RUN
    found = bring(Pod(storage), target)
    there = contents(run_folder(storage))
    assert found == {path: there[path] for path in there if path != ".lock" and "update-00000001/" not in path}
    assert not list(target.parent.glob(f".{RUN}.*")), "nothing is left beside it"
    what = fetched(target, set(found), chosen(()))
    assert (what.checkpoint, what.missing, what.files) == (2, (), len(found))


def test_a_connection_that_breaks_costs_nothing_that_had_come(storage: Path, tmp_path: Path) -> None:
    pod = Pod(storage)
    pod.breaks = [100_000, 100_000, 250_000]
    found = bring(pod, tmp_path / RUN)
    assert found["checkpoints/update-00000002/__0_0.distcp"] == b"w" * 300_000
    assert pod.sent == sum(map(len, found.values())), "no byte was sent twice"


def test_one_that_was_given_up_is_resumed_and_the_folder_was_never_half(storage: Path, tmp_path: Path) -> None:
    pod = Pod(storage)
    pod.breaks = [100_000, *[0] * 20]
    with pytest.raises(NotReached):
        bring(pod, tmp_path / RUN)
    assert not (tmp_path / RUN).exists()
    pod.breaks = []
    found = bring(pod, tmp_path / RUN)
    assert pod.sent == sum(map(len, found.values()))


def test_again_only_what_is_new_is_sent(storage: Path, tmp_path: Path) -> None:
    pod, folder = Pod(storage), run_folder(storage)
    bring(pod, tmp_path / RUN)
    pod.sent = 0
    with (folder / "events.jsonl").open("a") as events:
        events.write("more\n")
    (folder / "checkpoints/update-00000002").rename(folder / "checkpoints/update-00000003")
    (folder / "checkpoints/latest").write_text("update-00000003")
    found = bring(pod, tmp_path / RUN, ["summary"])
    assert pod.sent == len("more\n") and found["events.jsonl"].endswith(b"more\n")
    assert "checkpoints/update-00000002/state.json" in found, "what was not asked for stays"
    found = bring(pod, tmp_path / RUN, ["checkpoint"])
    assert "checkpoints/update-00000003/state.json" in found and "checkpoints/update-00000002/state.json" not in found
    assert found["checkpoints/latest"] == b"update-00000003"


def test_a_file_whose_beginning_has_changed_is_sent_whole(storage: Path, tmp_path: Path) -> None:
    pod, folder = Pod(storage), run_folder(storage)
    bring(pod, tmp_path / RUN)
    (folder / "summary.json").write_text('{"updates": 2}')
    assert bring(pod, tmp_path / RUN)["summary.json"] == b'{"updates": 2}'


def test_a_folder_of_something_else_is_not_touched(storage: Path, tmp_path: Path) -> None:
    target = tmp_path / RUN
    target.mkdir()
    (target / "spec.yaml").write_text("mine")
    with pytest.raises(ClusterError, match="was not fetched from this run: name another folder"):
        bring(Pod(storage), target)
    assert contents(target) == {"spec.yaml": b"mine"}
    bring(Pod(storage), tmp_path / "other")
    with pytest.raises(ClusterError, match="was not fetched from this run"):
        bring(Pod(storage), tmp_path / "other", uid="another")


class Hostile(Pod):
    """Lists `names`, and sends what nobody asked for."""

    def __init__(self, storage: Path, names: Sequence[str], sent: str = "summary.json"):
        super().__init__(storage)
        self.answers = {
            "list": [{"folder": "/", "files": [[name, 3] for name in names]}],
            "send": [{"path": sent, "size": 3}],
        }

    @contextmanager
    def __call__(self, words: Sequence[str]) -> Iterator[Answer]:
        with super().__call__(words) as answer:
            lines = iter(json.dumps(one).encode() for one in self.answers[words[0]])
            answer.readline = lambda: next(lines)  # type: ignore[method-assign]
            yield answer


@pytest.mark.parametrize(
    "names",
    [["../../spec.yaml"], ["/etc/x"], [""], ["."], ["rollout//x"], [".fetched.json"], ["spec.yaml", "spec.yaml/x"]],
)
def test_a_name_that_is_no_files_is_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ClusterError, match="the run's storage has a file"):
        bring(Hostile(tmp_path, names), tmp_path / "runs" / RUN)
    assert not (tmp_path / "runs" / RUN).exists()


def test_an_answer_that_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="sent 3 bytes of '../x', which was not asked for"):
        bring(Hostile(tmp_path, ["summary.json"], sent="../x"), tmp_path / "runs" / RUN)


def test_an_attempt_that_takes_over_meanwhile_is_not_mixed_with_the_one_before(storage: Path, tmp_path: Path) -> None:
    """Its files have the same names and sizes."""
    pod = Pod(storage)
    pod.breaks = [310_000]
    first, third = run_folder(storage), storage / "attempt-00000003-1795176000019" / RUN
    run, again = pod.__call__, third.parent

    @contextmanager
    def meanwhile(words: Sequence[str]) -> Iterator[Answer]:
        if words[0] == "list" and not pod.breaks and not again.exists():
            shutil.copytree(first, third)
            (third / "checkpoints/update-00000002/state.json").write_text('{"new": 2}')
            (third / "checkpoints/update-00000002/__0_0.distcp").write_text("x" * 300_000)
        with run(words) as answer:
            yield answer

    with opened(tmp_path / RUN, UID) as target:
        paths = fetch_files(meanwhile, target, chosen(()), quiet)  # type: ignore[arg-type]
        target.publish(chosen(()), paths)
    found = contents(tmp_path / RUN)
    assert found["checkpoints/update-00000002/state.json"] == b'{"new": 2}'
    assert found["checkpoints/update-00000002/__0_0.distcp"] == b"x" * 300_000


# --- the folder -------------------------------------------------------------------------------------------------------


def test_two_fetches_at_once_do_not_share_a_folder(storage: Path, tmp_path: Path) -> None:
    with opened(tmp_path / RUN, UID) as target:
        paths = fetch_files(Pod(storage), target, ("summary",), quiet)  # type: ignore[arg-type]
        with pytest.raises(ClusterError, match="another fetch brings files to"):
            bring(Pod(storage), tmp_path / RUN)
        target.publish(("summary",), paths)
    assert set(contents(tmp_path / RUN)) == paths
    assert bring(Pod(storage), tmp_path / RUN)["checkpoints/latest"] == b"update-00000002"


def test_a_partial_folder_that_was_removed_replaces_nothing(storage: Path, tmp_path: Path) -> None:
    before = bring(Pod(storage), tmp_path / RUN)
    with opened(tmp_path / RUN, UID) as target:
        paths = fetch_files(Pod(storage), target, ("summary",), quiet)  # type: ignore[arg-type]
        shutil.rmtree(target.partial)
        with pytest.raises(ClusterError, match="was removed while files came"):
            target.publish(("summary",), paths)
    assert contents(tmp_path / RUN) == before


def test_a_fetch_that_was_killed_between_its_renames_loses_nothing(
    storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bring(Pod(storage), tmp_path / RUN)
    (tmp_path / RUN).rename(tmp_path / f".{RUN}.old")  # as a kill leaves it
    assert bring(Pod(storage), tmp_path / RUN, ["summary"]) == before
    rename = Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bring(Pod(storage), tmp_path / RUN, ["summary"])
    assert contents(tmp_path / RUN) == before


def test_what_was_made_in_the_folder_stays(storage: Path, tmp_path: Path) -> None:
    (run_folder(storage) / "curve.png").write_text("the run's")
    bring(Pod(storage), tmp_path / RUN)
    mine = {"notes.md": "mine", "rollout/notes.md": "mine", "replay.html": "drawn", "curve.png": "drawn again"}
    for path, text in mine.items():
        (tmp_path / RUN / path).write_text(text)
    (tmp_path / RUN / "export" / "best").symlink_to(tmp_path)
    (run_folder(storage) / "replay.html").write_text("the run's")
    (run_folder(storage) / "rollout/rollout-000001.jsonl").unlink()
    found = bring(Pod(storage), tmp_path / RUN)
    assert {path: found[path].decode() for path in mine} == mine
    assert (tmp_path / RUN / "export" / "best").is_symlink()
    assert "rollout/rollout-000001.jsonl" not in found, "the run has it no more, and nobody touched it"


def test_what_was_changed_in_the_folder_is_not_replaced(storage: Path, tmp_path: Path) -> None:
    pod = Pod(storage)
    bring(pod, tmp_path / RUN)
    (tmp_path / RUN / "events.jsonl").write_text("trained here\n")
    (tmp_path / RUN / "checkpoints" / "latest").write_text("update-00000009")
    pod.sent = 0
    with pytest.raises(ClusterError, match=r"checkpoints/latest, events.jsonl in .*another folder \(--to\)"):
        bring(pod, tmp_path / RUN)
    assert pod.sent == 0 and contents(tmp_path / RUN)["events.jsonl"] == b"trained here\n"
    (run_folder(storage) / "checkpoints/latest").unlink()
    found = bring(pod, tmp_path / RUN, ["checkpoint"])
    assert found["checkpoints/latest"] == b"update-00000009", "also when the run has none any more"


def test_a_copy_of_a_fetched_folder_is_as_it_was_fetched(storage: Path, tmp_path: Path) -> None:
    bring(Pod(storage), tmp_path / RUN)
    shutil.copytree(tmp_path / RUN, tmp_path / "copy", copy_function=shutil.copyfile)
    pod = Pod(storage)
    bring(pod, tmp_path / "copy")
    assert pod.sent == 0


def test_a_full_disk_is_said_in_words(storage: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ClusterError, match=f"files can't be brought to .*{RUN}: .*File too large"):
            bring(Pod(storage), tmp_path / RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ClusterError, match="no part weights; there is summary, replay, checkpoint"):
        chosen(["weights"])
