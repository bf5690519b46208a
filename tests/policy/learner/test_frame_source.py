"""Frames of an update where a rank looks for them, without Ray: in the recording, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_samples import frame

from tapforge_trainer.frames.frame import FrameError
from tapforge_trainer.frames.handles import FramesLost
from tapforge_trainer.learner.frame_source import StoredFrames
from tapforge_trainer.recording.frames import FrameStore, FrameWriter
from tapforge_trainer.recording.retention import Retention


def test_what_is_in_no_handle_is_read_from_the_recording(tmp_path: Path) -> None:
    shots = [frame(96, 160, seed) for seed in range(3)]
    writer = FrameWriter(tmp_path, Retention())
    for shot in shots[:2]:
        writer.put(shot)
    writer.close()
    source = StoredFrames({}, frozenset(), FrameStore(tmp_path))
    assert source.read("e", [shots[1].name]) == {shots[1].name: shots[1]}
    assert source.lost({"a": {shots[0].name, shots[1].name}, "b": {shots[0].name, shots[2].name}, "c": set()}) == ["b"]
    with pytest.raises(FrameError, match=shots[2].name):
        source.read("b", [shots[2].name])


def test_a_node_without_the_recording_has_lost_what_is_in_no_handle() -> None:
    source = StoredFrames({}, frozenset(), None)
    assert source.lost({"a": {"x" * 64}, "b": set()}) == ["a"]
    with pytest.raises(FrameError, match="of episode a can't be fetched"):
        source.read("a", ["x" * 64])


def test_many_lost_episodes_are_counted_and_few_are_named() -> None:
    error = FramesLost({f"g{k}" for k in range(9)})
    assert error.episodes == tuple(f"g{k}" for k in range(9))
    assert "9 episodes" in str(error) and "g4, ..." in str(error)
