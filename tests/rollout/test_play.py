"""`tapforge env play`: an episode by hand is played as a run's, printed, recorded, and can be looked at."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parent.parent / "slots"))

from phones import PATIENT, TASKS, phones

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.protocol import Home, Outcome, Reason, Terminate
from tapforge_trainer.cli.main import cli
from tapforge_trainer.cli.play import PlayError, play, random_policy, read_actions
from tapforge_trainer.recording.reader import Recording

TASK = TASKS.sample(0, 0)


def written(path: Path, *actions: dict) -> Path:
    path.write_text("# by hand\n\n" + "".join(json.dumps(action) + "\n" for action in actions))
    return path


async def test_written_actions_are_played_printed_recorded_and_drawn(tmp_path):
    said: list[str] = []
    script = written(tmp_path / "script", {"type": "home"}, {"type": "tap", "x": 0.25, "y": 0.75})
    async with phones() as server:
        phone = PhoneAddress("the phone", server.url(), PATIENT)
        record = await play(phone, TASK, read_actions(script), tmp_path / "played", said.append)
        assert server.slots[0].episode is None
    assert [step.action["type"] for step in record.steps] == ["home", "tap", "terminate"]
    assert (record.reason, record.outcome, record.slot) == (Reason.DONE, Outcome.FAILURE, "the phone")
    assert [line.split()[0] for line in said] == ["reset", "step", "step", "step", "verdict"]
    assert "tap x=0.250 y=0.750" in said[2] and TASK.goal in said[0]
    recording = Recording(tmp_path / "played" / "rollout")
    assert list(recording.episodes()) == [record] and recording.is_complete(record)
    page = (tmp_path / "played" / "replay.html").read_text()
    assert page.count("data:image/png;base64,") >= 1
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:|#)[^"'\s>]+""", page) == []


async def test_a_random_policy_is_the_same_for_the_same_seed(tmp_path):
    played = []
    async with phones() as server:
        phone = PhoneAddress("p", server.url(), PATIENT)
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            record = await play(phone, TASK, random_policy(seed), tmp_path / name, print, max_steps=5)
            played.append([step.action for step in record.steps])
    assert played[0] == played[1] != played[2]
    assert max(map(len, played)) <= 5


def test_what_the_phone_does_not_have_is_said_and_is_an_answer_without_effect(tmp_path):
    """MobileWorld's protocol has no app switch."""
    server = [sys.executable, "-m", "tapforge_envs.phone.server", "--protocol", "mobileworld"]
    script = written(tmp_path / "script", {"type": "app_switch"}, {"type": "home"})
    options = ["--protocol", "mobileworld", "--policy", str(script), "--output", str(tmp_path / "played")]
    with subprocess.Popen(server, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        done = CliRunner().invoke(cli, ["env", "play", url, *options])
        process.terminate()
    assert done.exit_code == 0, done.output
    assert "step 0  refused, nothing was done" in done.output
    assert [line.split()[0] for line in done.output.splitlines()[:5]] == ["reset", "step", "step", "step", "verdict"]
    (record,) = Recording(tmp_path / "played" / "rollout").episodes()
    assert record.steps[0].action is None and record.steps[0].parse_error.startswith("unsupported_action")


async def test_an_episode_that_the_phone_breaks_is_recorded_as_far_as_it_went(tmp_path):
    async with phones() as server:
        await server.set_faults(0, {"kind": "error", "atStep": 1})
        script = written(tmp_path / "script", {"type": "home"}, {"type": "back"})
        words = ["env", "play", server.url(), "--policy", str(script), "--output", str(tmp_path / "played")]
        done = await asyncio.to_thread(CliRunner().invoke, cli, words)
    assert done.exit_code == 1 and "invalid (env_error)" in done.output and "fault on demand" in done.output
    (record,) = Recording(tmp_path / "played" / "rollout").episodes()
    assert len(record.steps) == 2 and (tmp_path / "played" / "replay.html").is_file()


async def test_a_folder_that_has_an_episode_is_left_as_it_is(tmp_path):
    async with phones() as server:
        phone = PhoneAddress("p", server.url(), PATIENT)
        await play(phone, TASK, lambda step: Terminate(status="success"), tmp_path, print)
        before = (tmp_path / "replay.html").read_bytes()
        with pytest.raises(PlayError, match="has an episode already"):
            await play(phone, TASK, lambda step: Home(), tmp_path, print)
        assert (tmp_path / "replay.html").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"type": "tap", "x": 2, "y": 0}', "script:1: Input should be less than or equal to 1"),
        (b'\n{"type": "fly"}', "script:2: "),
        (b"tap", "script:1: Invalid JSON"),
        (b"\xff\xfe", "can't be read"),
        (b"x" * (1024 * 1024 + 1), "is larger than"),
    ],
)
def test_a_file_of_actions_that_can_not_be_read_is_refused_with_its_line(tmp_path, text, words):
    (tmp_path / "script").write_bytes(text)
    with pytest.raises(PlayError, match=re.escape(words)):
        read_actions(tmp_path / "script")


def test_the_command_says_what_is_wrong(tmp_path):
    for words, said in (
        (["--policy", "/nowhere"], "can't be read"),
        (["--task", '{"suite": 1}'], "--task:1: suite: Input should be a valid string"),
        (["--task", "wifi", "--protocol", "mobileworld"], "no server answers"),
        (["--task", '{"template": "wifi", "goal": "Wi-Fi"}', "--protocol", "adb"], "--task:1: "),
        (["--task", "", "--protocol", "adb"], "--task names no task"),
    ):
        url = "127.0.0.1:1" if "adb" in words else "http://127.0.0.1:1"
        done = CliRunner().invoke(cli, ["env", "play", url, "--output", str(tmp_path / "new"), *words])
        assert done.exit_code in (1, 2) and said in done.output
    done = CliRunner().invoke(cli, ["env", "play", "ftp://x"])
    assert done.exit_code == 2 and "not an http(s) URL" in done.output
