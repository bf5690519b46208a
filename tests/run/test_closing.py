"""The end of a session: what is left is closed whatever became of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapforge_api import load
from tapforge_trainer.run.assembly import SetupError
from tapforge_trainer.run.folder import locked
from tapforge_trainer.run.sft import IMITATED, imitating
from tapforge_trainer.run.start import _closed


class _Part:
    def __init__(self, name: str, ended: list[str], fails: str = ""):
        self._name, self._ended, self._fails = name, ended, fails

    async def close(self) -> None:
        self._ended.append(self._name)
        if self._fails:
            raise RuntimeError(self._fails)


class _Journal(_Part):
    def close(self) -> None:  # type: ignore[override]
        self._ended.append(self._name)


async def test_a_part_that_can_t_be_closed_leaves_no_other_one_open() -> None:
    """Servers of models whose Ray is gone, above all: verdicts are written down all the same."""
    ended: list[str] = []
    player, journal = _Part("player", ended, "late"), _Journal("journal", ended)
    parts = player, _Part("servers", ended, "no Ray"), _Part("policy", ended, "no Ray"), journal
    with pytest.raises(RuntimeError):
        await _closed(*parts)  # type: ignore[arg-type]
    assert ended == ["player", "servers", "policy", "journal"]


def test_what_another_session_imitates_is_not_taken_away(tmp_path: Path) -> None:
    run = load(Path("manifests/samples/quickstart.yaml"))
    kept = tmp_path / run.metadata.name / IMITATED / "episodes.jsonl"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with locked(kept.parent.parent), pytest.raises(SetupError, match="in use by process"):
        imitating(run, tmp_path, tmp_path / "recorded", successes=False, balance=False)
    assert kept.exists()
