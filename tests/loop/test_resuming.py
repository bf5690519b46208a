"""Which checkpoint a run resumes from, start after start."""

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapforge_api import load
from tapforge_trainer.learner.checkpoint_storage import CheckpointFolder, read_state
from tapforge_trainer.run.local_files import inspect_files
from tapforge_trainer.run.resuming import resumed_from
from tapforge_trainer.telemetry.progress import Progress

SAMPLE = Path(__file__).parents[2] / "manifests/samples/quickstart.yaml"
RUN = load(SAMPLE).metadata.name


@dataclass
class Weights:
    """Says of a learner which checkpoint was loaded last."""

    settings: Any
    loaded: list[str] = field(default_factory=list)

    async def resume(self, where: str | None = None, *, moments: bool = True) -> dict[str, Any] | None:
        chosen = where or self.settings.place.latest()
        if chosen is None:
            return None
        self.loaded.append(Path(chosen).name)
        return read_state(chosen)["driver"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointFolder:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs", RUN, "checkpoints")
    folder.parent.mkdir(parents=True)
    return CheckpointFolder(folder)


def save(place: CheckpointFolder, progress: Progress, update: int, run: str = RUN) -> None:
    progress.run, progress.update = run, update
    document = {"format": 3, "update": update, "time": 1.0, "driver": asdict(progress)}
    draft = place.draft(update)
    place.begin(draft, document)
    place.publish(draft, document, {}, keep=5)


async def start(place: CheckpointFolder, given: str | None) -> tuple[Progress | None, list[str]]:
    run = load(SAMPLE, overrides=[] if given is None else [f"spec.checkpoints.resumeFrom={given}"])
    policy = Weights(SimpleNamespace(place=place))
    progress, _ = await resumed_from(run, policy, "")  # type: ignore[arg-type]
    return progress, policy.loaded


async def begun(place: CheckpointFolder, given: str | None, name: str) -> Progress:
    progress, loaded = await start(place, given)
    assert progress is not None and loaded == [name]
    return progress


async def test_an_older_one_of_its_own_counts_until_the_run_has_saved_after_it(place: CheckpointFolder) -> None:
    for update in (10, 20, 30):
        save(place, Progress(), update)
    older = f"runs/{RUN}/checkpoints/update-00000010"
    await begun(place, None, "update-00000030")
    await begun(place, older, "update-00000010")  # and is killed before it saves
    again = await begun(place, older, "update-00000010")
    save(place, again, 20)
    after = await begun(place, older, "update-00000020")
    save(place, after, 30)
    await begun(place, str(Path(older).resolve()), "update-00000030")  # the same one in other words


async def test_another_one_of_its_own_counts_anew(place: CheckpointFolder) -> None:
    save(place, Progress(), 10)
    save(place, Progress(), 20)
    folder = f"runs/{RUN}/checkpoints"
    save(place, await begun(place, f"{folder}/update-00000010", "update-00000010"), 11)
    save(place, await begun(place, f"{folder}/update-00000020", "update-00000020"), 21)
    save(place, await begun(place, None, "update-00000021"), 22)
    await begun(place, f"{folder}/update-00000020", "update-00000020")  # taken out of the file, and named again


async def test_it_may_be_pruned_once_the_run_has_saved_after_it(place: CheckpointFolder) -> None:
    save(place, Progress(), 10)
    older = f"runs/{RUN}/checkpoints/update-00000010"
    run = load(SAMPLE, overrides=[f"spec.checkpoints.resumeFrom={older}"])
    save(place, await begun(place, older, "update-00000010"), 20)
    shutil.rmtree(older)
    assert not inspect_files(run).errors
    await begun(place, older, "update-00000020")
    (place.folder / "latest").write_text("update-00000099\n")
    assert any("resumeFrom" in error for error in inspect_files(run).errors)


async def test_it_counts_where_the_newest_one_is_gone(place: CheckpointFolder) -> None:
    """What the message about that one asks for."""
    save(place, Progress(), 10)
    save(place, Progress(), 20)
    shutil.rmtree(place.folder / "update-00000020")
    await begun(place, f"runs/{RUN}/checkpoints/update-00000010", "update-00000010")


async def test_one_of_another_run_gives_its_weights_until_the_run_has_its_own(
    place: CheckpointFolder, tmp_path: Path
) -> None:
    other = CheckpointFolder(tmp_path / "other")
    save(other, Progress(), 7, run="other")
    assert await start(place, f"{other.folder}/update-00000007") == (None, ["update-00000007"])
    save(place, Progress(), 1)
    await begun(place, f"{other.folder}/update-00000007", "update-00000001")
