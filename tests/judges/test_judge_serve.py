"""`tapforge judge serve` as it is typed: it says where it is, answers, and ends at SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from click.testing import CliRunner
from judged_episodes import solved, some, spec

from tapforge_trainer.cli.main import cli
from tapforge_trainer.judges.judge import judge_of


async def start(*options: str) -> asyncio.subprocess.Process:
    command = "from tapforge_trainer.cli.main import cli; cli()"
    arguments = ["judge", "serve", *options]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", command, *arguments, stdout=pipe, stderr=pipe)


async def test_it_serves_until_it_is_stopped() -> None:
    process = await start(
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--error-rate",
        "1",
        "--error-rate-of",
        "open=0",
        "--status",
        "503",
        "--first",
        "1",
    )
    try:
        assert process.stdout is not None
        said = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        assert said["model"] == "simulated-phone" and said["url"].startswith("http://127.0.0.1:")
        judge = judge_of(spec(said["url"]), "task")
        for trajectory in some(12):
            right = trajectory.episode.task.template == "open"
            assert ((await judge.task(trajectory)).value == solved(trajectory)) == right
        assert judge.usage.failed == 1
        await judge.close()
        port = said["url"].split(":")[-1].removesuffix("/v1")
        second = await start("--host", "0.0.0.0", "--port", port)
        _, words = await asyncio.wait_for(second.communicate(), 60)
        assert second.returncode == 2 and "--port 0 takes a free one" in words.decode()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()


def test_options_that_make_no_sense_are_refused() -> None:
    for options, words in (
        (["--retry-after", "1"], "--retry-after is about --status"),
        (["--error-rate-of", "open"], "is not TEMPLATE=RATE"),
        (["--error-rate-of", "open=nan"], "is not TEMPLATE=RATE"),
    ):
        result = CliRunner().invoke(cli, ["judge", "serve", *options])
        assert result.exit_code == 2 and words in result.stderr
