"""What the learner computed of trained tokens: read back by episode, step and update, whatever became of the files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tapforge_trainer.learner.token_readings import TokenReadings, by_episode
from tapforge_trainer.recording.learner_tokens import LEARNER, LearnerTokenReader, LearnerTokens
from tapforge_trainer.recording.reader import RecordingError
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.recording.retention import Retention
from tapforge_trainer.records import ResponseSpan, Sample


def made(episode: str, seed: int, steps: tuple[tuple[int, int], ...] = ((0, 3), (2, 5))) -> LearnerTokens:
    """Gaps as they are between an engine and a learner, and one that is far off."""
    rng, count = np.random.default_rng(seed), sum(count for _, count in steps)
    gaps = rng.normal(0, 1e-2, count)
    gaps[-1] = -7.25
    return LearnerTokens(episode, steps, gaps, np.abs(rng.normal(0, 1, count)))


def same(found: LearnerTokens, written: LearnerTokens) -> bool:
    """To the three digits that half precision has."""
    assert (found.episode, found.steps) == (written.episode, written.steps)
    pairs = [(found.gaps, written.gaps), (found.entropies, written.entropies)]
    return all(np.allclose(mine, theirs, rtol=1e-3, atol=1e-7) for mine, theirs in pairs)


def found(reader: LearnerTokenReader, episode: str, update: int | None = None) -> tuple[int, LearnerTokens]:
    one = reader.find(episode, update)
    assert one is not None
    return one


def test_tokens_are_found_by_episode_step_and_update(tmp_path: Path) -> None:
    reader = LearnerTokenReader(tmp_path)
    assert not reader.exists and reader.find("a") is None, "an earlier version's recording has none"
    recorder = Recorder(tmp_path)
    first, other, replayed = made("a", 1), made("b", 2), made("a", 3)
    recorder.learner_tokens(1, [first, other])
    recorder.learner_tokens(4, [replayed])
    assert reader.exists
    assert found(reader, "a")[0] == 1 and same(found(reader, "a")[1], first)
    update, again = found(reader, "a", 4)
    assert update == 4 and same(again, replayed)
    assert found(reader, "a", 9)[0] == 1, "a page that counts updates from what is left of a recording asks for another"
    gaps, entropies = again.of_step(2) or ([], [])
    assert gaps == pytest.approx(replayed.gaps[3:], rel=1e-3, abs=1e-7)
    assert entropies == pytest.approx(replayed.entropies[3:], rel=1e-3)
    assert again.of_step(1) is None and reader.find("c") is None
    # An update that is repeated after a crash counts, not the one that was lost; the reader sees it at once.
    repeated = made("a", 5)
    recorder.learner_tokens(1, [repeated])
    assert same(found(reader, "a", 1)[1], repeated)
    recorder.close()
    LEARNER.index(tmp_path, 1).unlink()
    assert same(found(LearnerTokenReader(tmp_path), "a", 1)[1], repeated)


def test_a_cut_at_any_byte_loses_the_line_that_was_cut_alone(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    whole, cut = made("a", 1), made("b", 2, ((0, 2),))
    recorder.learner_tokens(1, [whole])
    size = LEARNER.path(tmp_path, 1).stat().st_size
    recorder.learner_tokens(1, [cut])
    recorder.close()
    path = LEARNER.path(tmp_path, 1)
    written = path.read_bytes()
    for end in range(size, len(written)):
        path.write_bytes(written[:end])
        reader = LearnerTokenReader(tmp_path)
        assert same(found(reader, "a")[1], whole) and reader.find("b") is None
        recorder = Recorder(tmp_path)
        recorder.learner_tokens(2, [made("c", 3)])
        recorder.close()
        assert found(LearnerTokenReader(tmp_path), "c")[0] == 2
        assert same(found(LearnerTokenReader(tmp_path), "a")[1], whole)


def test_the_oldest_are_removed_at_the_bound_of_the_recording(tmp_path: Path) -> None:
    bound = 100_000
    recorder, reader = Recorder(tmp_path, Retention(max_bytes=bound)), LearnerTokenReader(tmp_path)
    for update in range(1, 61):
        recorder.learner_tokens(update, [made(f"e{update}", update, ((0, 1000),))])
        recorder.sync()
        assert found(reader, f"e{update}")[0] == update
    recorder.close()
    there = [reader.find(f"e{update}") is not None for update in range(1, 61)]
    assert there == sorted(there) and not there[0] and sum(there) > 5
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < bound + 1000


@pytest.mark.parametrize("tokens", [3, 300])
def test_a_recording_that_took_the_place_of_another_is_read_anew(tmp_path: Path, tokens: int) -> None:
    """A run's folder that is removed and filled by another run has files and episodes of the same names."""
    folder = tmp_path / "rollout"
    steps = ((0, 3),)
    recorder, reader = Recorder(folder), LearnerTokenReader(folder)
    recorder.learner_tokens(1, [made("a", 1, steps), made("b", 2, steps)])
    recorder.close()
    assert found(reader, "a")[0] == 1
    shutil.rmtree(folder)
    recorder = Recorder(folder)
    others = {name: made(name, seed, ((0, tokens),)) for seed, name in enumerate("bac", 3)}
    recorder.learner_tokens(1, list(others.values()))
    recorder.close()
    assert all(same(found(reader, name)[1], written) for name, written in others.items())


def test_a_broken_segment_hides_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "rollout"
    recorder = Recorder(folder, segment_bytes=1)
    for update, name in enumerate("abc", 1):
        recorder.learner_tokens(update, [made(name, update)])
    recorder.close()
    LEARNER.path(folder, 2).write_bytes(b"{broken\n")
    LEARNER.index(folder, 2).unlink()
    reader = LearnerTokenReader(folder)
    for _ in range(2):
        with pytest.raises(RecordingError, match="learner-000002.jsonl: broken line at byte 0"):
            reader.refresh()
    LEARNER.drop(folder, 2)
    assert [reader.find(name) is not None for name in "abc"] == [True, False, True]


def span(step: int, start: int, *logprobs: float) -> ResponseSpan:
    return ResponseSpan(step, start, start + len(logprobs), logprobs, (0,) * len(logprobs), 1.0)


def test_what_ranks_read_goes_to_the_steps_of_joined_samples() -> None:
    samples = [
        Sample("a", "g", range(20), 20, (), (span(0, 2, -0.5, -1.0), span(1, 8, -2.0))),
        Sample("b", "g", range(9), 9, (), (span(0, 4, -0.25),)),
        Sample("a", "g", range(9), 9, (), (span(2, 4, -4.0, -3.0),)),
    ]
    first, second = TokenReadings(), TokenReadings()
    first.keep(np.array([3, 0, 1, 2]), np.array([[-0.5, -0.75, -1.0, -2.5], [0.3, 0.0, 0.1, 0.2]], np.float32))
    second.keep(np.array([4, 5]), np.array([[-4.5, -3.0], [0.4, 0.5]], np.float32))
    a, b = by_episode(samples, [first, second])
    assert (a.episode, a.steps, b.episode, b.steps) == ("a", ((0, 2), (1, 1), (2, 2)), "b", ((0, 1),))
    assert a.gaps.tolist() == [0.25, 0.0, 0.5, 0.5, 0.0] and b.gaps.tolist() == [0.25]
    assert a.entropies == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.5]) and b.entropies == pytest.approx([0.3])
