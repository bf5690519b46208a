"""Rough runs and questions: numbers that are none, half characters, damaged files, a cache that can't be written."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import aiohttp
import pytest
from load.made_run import Shape, made_group, make_run, screens

from tapforge_trainer.dashboard.library import Library
from tapforge_trainer.dashboard.opened import OpenRun
from tapforge_trainer.dashboard.serve import serving
from tapforge_trainer.recording.reader import RecordingError
from tapforge_trainer.recording.recorder import Recorder

SMALL = Shape(16, steps=3, screens=6, groups=2, prompt=8, answer=4, measured=0)


def made(folder: Path) -> Path:
    """A run; its last group's first episode went wrong in every way that a model and a phone have."""
    make_run(folder, SMALL)
    frames = screens(SMALL.screens, SMALL.width, SMALL.height, 0)
    one, _ = made_group(Random(3), SMALL, 1, 9, frames, count=2).episodes
    first, *others = one.steps
    numbers = replace(first.generation, logprobs=tuple(float("-inf") for _ in first.generation.logprobs))
    half = replace(first, text="half \ud83d <script>", note="nul \0", reward=float("inf"), generation=numbers)
    task = one.task.model_copy(update={"goal": "half \ud83d too"})
    recorder = Recorder(folder / "rollout")
    recorder.episode(replace(one, id="rough", task=task, message="\udcff", steps=(half, *others)), frames)
    recorder.close()
    return folder


async def answered(session: aiohttp.ClientSession, address: str, **words: str) -> tuple[int, dict]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    async with session.get(address, params=words) as answer:
        return answer.status, json.loads(await answer.text(), parse_constant=refuse)


async def test_an_episode_of_half_characters_and_of_no_numbers_is_read_and_shown(tmp_path: Path) -> None:
    made(tmp_path / "run")
    async with serving([tmp_path / "run"], "127.0.0.1", 0) as page, aiohttp.ClientSession() as session:
        async with asyncio.timeout(60):
            while (found := await answered(session, f"{page}api/runs/run/episodes", q="half"))[1]["total"] < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert found[1]["trouble"] == "" and found[1]["episodes"][0]["goal"] == "half ? too"
        named = {"recording": "rollout", "name": "rough"}
        status, episode = await answered(session, f"{page}api/runs/run/episode", **named)
        assert status == 200 and episode["steps"][0]["text"] == "half \ud83d <script>"
        assert episode["steps"][0]["logprob"] is None and episode["steps"][0]["reward"] is None
        status, step = await answered(session, f"{page}api/runs/run/step", **named, step="0")
        assert status == 200 and step["answer"]["tokens"][0]["logprob"] is None


async def test_questions_that_no_page_asks_are_refused_and_no_token_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(tmp_path / "run", SMALL)
    async with serving([tmp_path / "run"], "127.0.0.1", 0, "secret") as page:
        port = int(page.rstrip("/").rpartition(":")[2])
        for line, header, status in (
            ("/", b"Authorization: Bearer \xff", b"401"),
            ("/", b"Cookie: tapforge_view=\xff", b"401"),
            ("/?token=secret\0", b"Accept: */*", b"400"),
            ("/api/runs/run/frame?recording=rollout&name=%00", b"Authorization: Bearer secret", b"404"),
            (f"/api/runs/run/episodes?{'&'.join(['steps=1..2'] * 700)}", b"Authorization: Bearer secret", b"400"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"GET {line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode() + header + b"\r\n\r\n"
            )
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            assert answer.split()[1] == status and b"Traceback" not in answer, answer[:200]
    assert "secret" not in caplog.text and not caplog.records


def test_an_index_needs_no_folder_that_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("TAPFORGE_CACHE", str(tmp_path / "cache"))
    run = OpenRun(make_run(tmp_path / "run", SMALL))
    run.facets()
    run.work()
    assert run.episodes([])["total"] == 16 and run.trouble == ""
    run.close()


def test_an_index_that_is_damaged_within_is_made_anew(tmp_path: Path) -> None:
    run = OpenRun(make_run(tmp_path / "run", SMALL))
    run.facets()
    run.work()
    path = run._opened()._database.path
    run.close()
    data = path.read_bytes()
    path.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    run = OpenRun(tmp_path / "run")
    with pytest.raises(RecordingError, match="the index .* can't be read"):
        run.episodes([])
    while run.work() or run.trouble:
        pass
    assert run.episodes([])["total"] == 16
    run.close()


def test_a_broken_line_hides_what_is_behind_it_in_its_segment_alone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", replace(SMALL, measured=12))
    path = folder / "rollout" / "rollout-000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [place for place, line in enumerate(lines, 1) if line.startswith(b'{"kind":"episode"')]
    lines.insert(ends[3], b'{"kind":"epis\n')
    path.write_bytes(b"".join(lines))
    run = OpenRun(folder)
    run.facets()
    for _ in range(2):
        run.work()
        assert "broken record" in run.trouble
        assert run.episodes([("recording", "rollout")])["total"] == 4 and run.episodes([])["total"] == 4 + 2 * 12
    run.close()


def test_events_of_another_release_and_a_spec_that_is_none_hide_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", SMALL)
    before = OpenRun(folder).figures(["learner/entropy"])
    with (folder / "events.jsonl").open("a") as file:
        for event in ({"event": "update"}, {"event": "update", "update": 3, "so_far": 3}, {"event": "stage"}):
            file.write(json.dumps(event) + "\n")
    assert OpenRun(folder).figures(["learner/entropy"]) == before
    make_run(tmp_path / "runs" / "two", SMALL)
    (tmp_path / "runs" / "two" / "spec.yaml").write_bytes(b"\xff\0")
    library = Library([tmp_path / "runs"])
    assert library.names() == ["one"]
    library.close()


def test_one_run_that_cannot_be_read_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        make_run(tmp_path / name, SMALL)
    monkeypatch.setattr("tapforge_trainer.dashboard.library._EVERY", 0.01)
    library = Library([tmp_path / "one", tmp_path / "two"])
    bad, good = library.get("one"), library.get("two")
    monkeypatch.setattr(bad, "work", lambda: {}["a fault of ours"])
    bad.facets()
    good.facets()
    for _ in range(3000):
        if good.episodes([])["total"] == 16 and bad.trouble:
            break
        time.sleep(0.01)
    assert good.episodes([])["total"] == 16 and "a fault of ours" in bad.trouble
    library.close()
