"""The files of a run over its attempts: each takes over from the one before, and none can be disturbed by it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapforge_api import attempt as variables
from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.cluster import storage
from tapforge_trainer.cluster.attempt import RunAttempt
from tapforge_trainer.cluster.storage import FencedOut, Holder, RunStorageError, folder_of, newest, take_over
from tapforge_trainer.judges.journal import VERDICTS, VerdictJournal, Written
from tapforge_trainer.judges.verdicts import Verdict
from tapforge_trainer.learner.checkpoint_storage import CheckpointFolder
from tapforge_trainer.recording.learner_tokens import LearnerTokenReader, LearnerTokens
from tapforge_trainer.recording.reader import Recording, RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.records import EpisodeRecord
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.telemetry import telemetry


def _save(root: Path, update: int) -> None:
    """A checkpoint as the driver publishes it, once ranks have written theirs."""
    place, document = CheckpointFolder(root), {"format": 3, "update": update, "driver": {}}
    draft = place.draft(update)
    place.begin(draft, document)
    Path(draft.target, "weights.distcp").write_bytes(b"weights")
    place.publish(draft, document, {}, keep=2)


def _root(runs: Path) -> Path:
    return runs / "tiny" / "checkpoints"


def _begin(place: Path, who: int | Holder) -> Path:
    """As a driver begins: its folder of runs, with the run's folder in it."""
    runs = take_over(place, who if isinstance(who, Holder) else Holder(who))
    (runs / "tiny").mkdir(exist_ok=True)
    return runs


# --- taking over ------------------------------------------------------------------------------------------------------


def test_an_attempt_goes_on_where_the_one_before_stopped(tmp_path: Path) -> None:
    place = tmp_path / "lab" / "uid-1"
    first = _begin(place, 1)
    _save(_root(first), 3)
    assert take_over(place, Holder(1)) == first, "a driver that was started again in place"
    second = take_over(place, Holder(2))
    latest = CheckpointFolder(_root(second)).latest()
    assert latest is not None and Path(latest).name == "update-00000003"
    assert [path.name for path in place.iterdir()] == [second.name]


def test_an_older_attempt_that_comes_back_can_not_move_latest(tmp_path: Path) -> None:
    first = _begin(tmp_path, 1)
    for update in (1, 2):
        _save(_root(first), update)
    second = _begin(tmp_path, 2)
    _save(_root(second), 3)
    with pytest.raises(FileNotFoundError):
        _save(_root(first), 9)
    assert not first.exists()
    latest = CheckpointFolder(_root(second)).latest()
    assert latest is not None and Path(latest).name == "update-00000003"
    assert Path(latest, "weights.distcp").read_bytes() == b"weights"


def test_an_older_attempt_that_was_in_the_middle_of_a_checkpoint_can_not_finish_it(tmp_path: Path) -> None:
    root = _root(_begin(tmp_path, 1))
    _save(root, 1)
    draft = CheckpointFolder(root).draft(2)
    CheckpointFolder(root).begin(draft, {})
    second = _root(take_over(tmp_path, Holder(2)))
    with pytest.raises(FileNotFoundError):
        CheckpointFolder(root).publish(draft, {"format": 3, "update": 2}, {}, keep=2)
    assert (second / "latest").read_text() == "update-00000001\n"
    _save(second, 2)
    assert sorted(path.name for path in second.iterdir()) == ["latest", "update-00000001", "update-00000002"]


def test_of_two_starts_of_an_attempt_the_later_one_goes_on(tmp_path: Path) -> None:
    """A queue took the machines of the first, whose driver lives on, and let the attempt in again."""
    evicted, again = Holder(2, 1_795_176_000_000), Holder(2, 1_795_176_090_000)
    first = _root(_begin(tmp_path, evicted))
    _save(first, 3)
    draft = CheckpointFolder(first).draft(4)
    CheckpointFolder(first).begin(draft, {})
    second = _root(take_over(tmp_path, again))
    assert (second / "latest").read_text() == "update-00000003\n"
    with pytest.raises(FileNotFoundError):
        CheckpointFolder(first).publish(draft, {"format": 3, "update": 4}, {}, keep=2)
    with pytest.raises(FencedOut, match="attempt 2 was started once more, later"):
        take_over(tmp_path, evicted)
    assert _root(take_over(tmp_path, again)) == second, "its own driver may be started again in place"
    _save(second, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-00000002-1795176090000"]


@pytest.mark.parametrize("left", ["attempt-00000001", "taking-00000001"])
@pytest.mark.parametrize("holder", [Holder(1, 1_795_176_000_000), Holder(2, 1_795_176_000_000), Holder(1)])
def test_what_an_earlier_release_left_is_gone_on_with(tmp_path: Path, left: str, holder: Holder) -> None:
    """Its folders have no time in their names."""
    _save(_root(_begin(tmp_path, 1)), 5)
    folder_of(tmp_path, Holder(1)).rename(tmp_path / left)
    runs = take_over(tmp_path, holder)
    assert (_root(runs) / "latest").read_text() == "update-00000005\n"
    assert [path.name for path in tmp_path.iterdir()] == [runs.name]


@pytest.mark.parametrize("later", [2, 7])
def test_an_older_attempt_that_is_started_again_takes_nothing(tmp_path: Path, later: int) -> None:
    _begin(tmp_path, 1)
    runs = take_over(tmp_path, Holder(later))
    with pytest.raises(FencedOut, match=f"attempt {later} .* from attempt 1"):
        take_over(tmp_path, Holder(1))
    assert [path.name for path in tmp_path.iterdir()] == [runs.name]


def test_what_an_older_attempt_made_anew_is_not_taken_for_the_run(tmp_path: Path) -> None:
    """It may be between looking and making its folder when it is taken over."""
    _save(_root(_begin(tmp_path, 1)), 5)
    _begin(tmp_path, 2)
    (folder_of(tmp_path, Holder(1)) / "tiny").mkdir(parents=True)
    _save(_root(folder_of(tmp_path, Holder(1))), 1)
    third = take_over(tmp_path, Holder(3))
    assert (_root(third) / "latest").read_text() == "update-00000005\n"
    assert [path.name for path in tmp_path.iterdir()] == [third.name]


def test_a_run_that_is_made_again_under_its_name_begins_anew(tmp_path: Path) -> None:
    _save(_root(_begin(tmp_path / "lab" / "uid-1", 1)), 100)
    again = _begin(tmp_path / "lab" / "uid-2", 1)
    assert CheckpointFolder(_root(again)).latest() is None
    assert list((again / "tiny").iterdir()) == []


@pytest.mark.parametrize("after", ["rename", "_detach"])
def test_a_crash_while_taking_over_loses_nothing(tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(_root(_begin(tmp_path, 1)), 4)
    detach = storage._detach

    def dies(folder: Path) -> None:
        if after == "_detach":
            detach(folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage, "_detach", dies)
        with pytest.raises(KeyboardInterrupt):
            take_over(tmp_path, Holder(2))
    assert newest(tmp_path) == Holder(2)
    with pytest.raises(FencedOut):
        take_over(tmp_path, Holder(1))
    again = take_over(tmp_path, Holder(2 if after == "rename" else 3))
    assert (_root(again) / "latest").read_text() == "update-00000004\n"


holders = st.builds(Holder, st.integers(1, 3), st.integers(0, 3))


@settings(max_examples=40)
@given(starts=st.lists(holders, max_size=12))
def test_whoever_starts_when_there_is_one_folder_and_the_latest_has_it(
    tmp_path_factory: pytest.TempPathFactory, starts: list[Holder]
) -> None:
    place = tmp_path_factory.mktemp("storage")
    seen: Holder | None = None
    for holder in starts:
        if seen is not None and holder < seen:
            with pytest.raises(FencedOut):
                take_over(place, holder)
        else:
            root = _root(_begin(place, holder))
            before = int((root / "latest").read_text()[-9:]) if seen is not None else 0
            _save(root, before + 1)
            seen = holder
        assert newest(place) == seen
        assert len(list(place.iterdir())) == 1
    if seen is not None:
        whole = int((_root(folder_of(place, seen)) / "latest").read_text()[-9:])
        assert whole == sum(holder == max(starts[: k + 1]) for k, holder in enumerate(starts))
    shutil.rmtree(place)


def test_what_a_former_attempt_goes_on_writing_is_not_in_the_recording(tmp_path: Path) -> None:
    task = catalog.tasks("quickstart", "train").sample(0, 0)

    def episode(name: str) -> EpisodeRecord:
        return EpisodeRecord(
            name, "g1-000001", task, 0, "local-0", 7, Reason.DONE, Outcome.SUCCESS, 1.0, "", (), started=1.0, ended=2.0
        )

    def learned(name: str) -> LearnerTokens:
        return LearnerTokens(name, ((0, 1),), np.zeros(1), np.zeros(1))

    first = _begin(tmp_path, 1) / "tiny"
    old = Recorder(first / "rollout")
    old.episode(episode("before"), {})
    old.learner_tokens(1, [learned("before")])
    events = telemetry.Telemetry(first, telemetry.ProgressView("tiny", 3))
    events.event("update", update=1)
    (first / ".lock").write_text("17")
    verdict = Verdict(1.0, "", (), 0, 1, 1, 0.0, "m")
    journal = VerdictJournal(first / VERDICTS)
    journal.put(Written("before", "before", "e", None, verdict))
    journal.flush()

    second = take_over(tmp_path, Holder(2)) / "tiny"
    going_on = VerdictJournal(second / VERDICTS)
    going_on.put(Written("after", "after", "e", None, verdict))
    new = Recorder(second / "rollout")
    new.episode(episode("after"), {})
    new.learner_tokens(2, [learned("after")])
    for late in ("late-0", "late-1"):
        old.episode(episode(late), {})
        old.learner_tokens(3, [learned(late)])
    events.event("update", update=2)
    journal.put(Written("late", "late", "e", None, verdict))
    journal.close()
    going_on.close()
    with pytest.raises(RecordingError, match="can't be written"):
        old.close()  # its folder has gone: it hears of it at the next batch
    new.close()
    events.close()
    assert [record.id for record in Recording(second / "rollout").episodes()] == ["before", "after"]
    reader = LearnerTokenReader(second / "rollout")
    assert [name for name in ("before", "after", "late-0", "late-1") if reader.find(name)] == ["before", "after"]
    assert (second / telemetry.EVENTS).read_text().count("update") == 2, "the event's name and its figure"
    assert [line.key for line in VerdictJournal(second / VERDICTS).of("e")] == ["before", "after"]
    assert not (second / ".lock").exists()


def test_of_segments_only_the_newest_is_copied(tmp_path: Path) -> None:
    """The others are whole, and a run has gigabytes of them."""
    first = _begin(tmp_path, 1) / "tiny" / "rollout"
    first.mkdir()
    old = [f"rollout-00000{n}.{ending}" for n in (1, 2) for ending in ("jsonl", "index")]
    for name in old:
        (first / name).write_text(name)
    before = {name: (first / name).stat().st_ino for name in old}
    second = take_over(tmp_path, Holder(2)) / "tiny" / "rollout"
    assert {name: (second / name).read_text() for name in old} == {name: name for name in old}
    copied = {name for name in old if (second / name).stat().st_ino != before[name]}
    assert copied == {"rollout-000002.jsonl", "rollout-000002.index"}


# --- volumes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system, or mounts it again with other options."""
    place = tmp_path / "volume"
    place.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            missing = "no small file system can be mounted here"
            if os.environ.get("CI"):
                pytest.fail(f"{missing}, and in CI it must be", pytrace=False)
            pytest.skip(f"NO FULL OR READ-ONLY VOLUME WAS TESTED: {missing}")
        return place

    yield mount
    if os.path.ismount(place):
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_volume_is_named_with_the_remedy(volume: Callable[[str], Path]) -> None:
    place = volume("size=1m")
    root = _root(_begin(place, 1))
    _save(root, 1)
    volume("remount,ro")
    for attempt in (1, 2):
        with pytest.raises(
            RunStorageError, match=f"{place} can't be written: Read-only .*its claim must allow writing"
        ):
            take_over(place, Holder(attempt))
    latest = CheckpointFolder(root).latest()
    assert latest is not None and Path(latest).name == "update-00000001"


def test_a_full_volume_is_named_with_the_remedy(volume: Callable[[str], Path]) -> None:
    place = volume("size=64k")
    root = _root(_begin(place, 1))
    _save(root, 1)
    with pytest.raises(OSError, match="No space"):
        (place / "ballast").write_bytes(b"\0" * (1 << 20))
    with pytest.raises(RunStorageError, match=f"{place} can't be written: No space.*enlarge its claim"):
        take_over(place, Holder(1))
    latest = CheckpointFolder(root).latest()
    assert latest is not None and Path(latest, "weights.distcp").read_bytes() == b"weights"
    (place / "ballast").unlink()
    assert _root(take_over(place, Holder(1))) == root


def test_a_storage_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStorageError, match="file can't be written"):
        take_over(tmp_path / "file", Holder(1))


# --- what the Pod says ------------------------------------------------------------------------------------------------

POD = {
    variables.RUN: "tiny",
    variables.NAMESPACE: "lab",
    variables.RUN_UID: "uid-1",
    variables.ATTEMPT: "2",
    variables.STORAGE: "/var/lib/storage/lab/uid-1",
}


def test_an_attempt_is_what_its_pod_says() -> None:
    assert RunAttempt.of({}) is None
    assert RunAttempt.of(POD) == RunAttempt("tiny", "lab", "uid-1", 2, Path("/var/lib/storage/lab/uid-1"))
    more = RunAttempt.of(POD | {"RAY_CLUSTER_NAME": "tiny-2-abcde", "TAPFORGE_DRIVER_STARTED": "1795176000000"})
    assert more is not None
    assert (more.cluster, more.holder) == ("tiny-2-abcde", Holder(2, 1_795_176_000_000))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({variables.STORAGE: "", variables.RUN_UID: ""}, "TAPFORGE_RUN_UID, TAPFORGE_STORAGE are not"),
        ({variables.ATTEMPT: "0"}, "TAPFORGE_ATTEMPT has to be a number from 1"),
        ({variables.ATTEMPT: "two"}, "not 'two'"),
    ],
)
def test_a_pod_that_says_something_else(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        RunAttempt.of(POD | change)
