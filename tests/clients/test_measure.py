"""`tapforge env bench`: what is counted is what was called, and faults are named."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from phones import PATIENT, phones

from tapforge_envs.clients.phones import PhoneAddress
from tapforge_envs.measure import measure, percentile
from tapforge_envs.protocol import EnvironmentFault
from tapforge_trainer.cli.main import cli


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(1, 100))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values, share):
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(value <= found for value in ordered) >= share / 100 * len(ordered) - 1e-9
    assert sum(value < found for value in ordered) < share / 100 * len(ordered) + 1e-9


async def test_every_call_on_every_phone_is_counted():
    async with phones(3) as server:
        addresses = [PhoneAddress(url, url, PATIENT) for url in server.urls]
        report = (await measure(addresses, None, 0.5, 4)).report()
        counts = {name: spread["count"] for name, spread in report["calls"].items()}
        assert counts["reset"] == counts["evaluate"] == counts["close"] == report["episodes"] >= 3
        assert report["episodes"] - 3 <= counts["step"] / 4 <= report["episodes"]
        assert (report["phones"], report["faults"]) == (3, 0) and report["mean_frame_kib"] > 0
        assert report["steps_per_second"] == pytest.approx(counts["step"] / report["seconds"], rel=0.05)
        for spread in report["calls"].values():
            assert 0 < spread["p50_ms"] <= spread["p90_ms"] <= spread["p99_ms"] <= spread["max_ms"]
        assert all(slot.episode is None for slot in server.slots)


async def test_faults_are_counted_by_their_words_and_the_others_go_on():
    async with phones(2) as server:
        await server.set_faults(1, {"kind": "error", "atStep": 1})
        addresses = [PhoneAddress(f"phone-{i}", url, PATIENT) for i, url in enumerate(server.urls)]
        for seconds in (0.3, 3.0, 30.0):  # a busy machine is late with the step
            report = (await measure(addresses, None, seconds, 3)).report()
            if report["faults"] and report["episodes"]:
                break
        (words,) = report["faults_by_words"]
        assert words.startswith("phone-1: step 1") and report["faults"] >= 1
        assert report["episodes"] >= 1


async def test_without_a_server_or_a_task_nothing_is_measured():
    with pytest.raises(EnvironmentFault, match="no server answers"):
        await measure([PhoneAddress("p", "http://127.0.0.1:1", PATIENT)], None, 1, 1)


async def test_the_command_prints_a_table_and_writes_json(tmp_path):

    async with phones() as server:
        out = tmp_path / "bench.json"
        words = ["env", "bench", server.url(), "--seconds", "0.2", "--output", str(out)]
        done = await asyncio.to_thread(CliRunner().invoke, cli, words)
        assert done.exit_code == 0, done.output
        assert "p50" in done.output and "steps/s" in done.output
        assert json.loads(out.read_text())["calls"]["reset"]["count"] >= 1
        done = await asyncio.to_thread(CliRunner().invoke, cli, ["env", "bench", "http://127.0.0.1:1"])
        assert done.exit_code == 1 and "no server answers" in done.output
