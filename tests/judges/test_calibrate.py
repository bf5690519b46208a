"""A judge against the verifier: the figures by hand, and the command on a recording, against the served judge."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from judged_episodes import serving, solved, some, spec

from tapforge_envs.protocol import Outcome, Reason
from tapforge_trainer.cli.main import cli
from tapforge_trainer.frames.frame import FittedFrame, decode
from tapforge_trainer.judges.calibration import Compared, agreement, calibration
from tapforge_trainer.judges.server import Faults, JudgeServer
from tapforge_trainer.judges.simulated import Errors
from tapforge_trainer.recording.recorder import Recorder
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.calibrate import CalibrationError, calibrate, judge_spec, tables


def of(tp: int, fn: int, fp: int, tn: int, template: str = "a") -> list[Compared]:
    pairs = [(True, True)] * tp + [(True, False)] * fn + [(False, True)] * fp + [(False, False)] * tn
    return [Compared(template, 3, verified, verdict) for verified, verdict in pairs]


def test_figures_of_a_table_by_hand() -> None:
    found = agreement([*of(40, 10, 5, 45), Compared("a", 1, True, None)])
    assert (found.episodes, found.missing) == (101, 1)
    assert found.precision.value == pytest.approx(40 / 45)
    assert found.recall.value == pytest.approx(0.8)
    assert found.false_positive_rate.value == pytest.approx(0.1)
    assert found.accuracy.value == pytest.approx(0.85)
    # (0.85 - 0.5) / (1 - 0.5)
    assert found.kappa.value == pytest.approx(0.7) and found.kappa.interval is None
    wilson = found.recall.interval
    assert wilson is not None and (wilson.low, wilson.high) == pytest.approx((0.6696, 0.8876), abs=1e-3)


def test_kappa_has_an_interval_over_templates_and_none_where_it_says_nothing() -> None:
    episodes = of(10, 2, 1, 7, "a") + of(4, 4, 4, 4, "b") + of(9, 0, 0, 11, "c")
    kappa = agreement(episodes).kappa
    assert kappa.value is not None and kappa.interval is not None
    assert -1 <= kappa.interval.low < kappa.value < kappa.interval.high <= 1
    assert agreement(episodes, seed=0) == agreement(list(reversed(episodes)), seed=0)
    assert agreement(of(5, 0, 0, 0)).kappa.value is None
    certain = agreement(of(9, 0, 0, 9, "a") + of(9, 0, 0, 9, "b")).kappa
    assert certain.value == 1.0 and certain.interval is not None and 0.7 < certain.interval.low < 0.9
    empty = agreement([])
    assert empty.precision.value is None and empty.precision.interval is None and empty.kappa.value is None


def test_a_gain_is_divided_into_what_is_true_and_what_is_not() -> None:
    rng = Random(1)

    def part(solved: float, false: float, template: str) -> list[Compared]:
        return [
            Compared(template, 4, verified, verified or rng.random() < false)
            for verified in (rng.random() < solved for _ in range(200))
        ]

    hacked = [one for share in (0.0, 0.2, 0.5) for name in "ab" for one in part(0.3, share, name)]
    gain = calibration(hacked).gain
    assert gain is not None and gain.episodes == 800
    assert gain.by_judge == pytest.approx(gain.by_verifier + gain.false_positives - gain.false_negatives)
    assert gain.false_positives > 0.25 and abs(gain.by_verifier) < 0.1
    assert gain.false_positives_interval is not None and gain.false_positives_interval.low > 0.2
    assert gain.at_most_false is not None and gain.at_most_false > 0.5
    # what isn't asked about is a failure for both
    limits = [replace(one, verdict=None, asked=False, verified=False) for one in hacked]
    quiet = calibration(limits)
    assert quiet.gain is not None and quiet.gain.by_judge == 0 and quiet.not_asked == 1200 and quiet.all.episodes == 0
    assert calibration([]).gain is None


def test_rules_and_lengths_divide_the_same_episodes() -> None:
    episodes = [
        Compared("a", steps, steps % 2 == 0, True, (1.0, 1.0 if steps % 2 == 0 else 0.0, 1.0)) for steps in range(1, 31)
    ]
    found = calibration(episodes)
    assert found.by_voting["unanimous"].precision.value == 1.0
    assert found.by_voting["majority"].precision.value == found.by_voting["single"].precision.value == 0.5
    assert list(found.by_length) == ["1 to 11 steps", "12 to 21 steps", "22 to 30 steps"]
    assert sum(one.episodes for one in found.by_length.values()) == 30
    assert list(calibration(episodes[:1]).by_length) == ["1 to 1 steps"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 episodes of a demonstrator that gets better, one of them without a screen and one cut short."""
    folder = tmp_path_factory.mktemp("run")
    recorder = Recorder(folder / "rollout")
    for number, trajectory in enumerate(some(60, error_rate=0.4)):
        frames = {}
        steps = []
        for step, screen in zip(trajectory.episode.steps, trajectory.screens, strict=False):
            frame = FittedFrame.of(decode(screen, "screen"))
            if number != 7:
                frames[frame.name] = frame
            steps.append(replace(step, frames=(frame.name,)))
        record = replace(trajectory.episode, id=f"e{number}", steps=tuple(steps))
        if number == 8:
            record = replace(record, outcome=Outcome.FAILURE, reason=Reason.STEP_LIMIT)
        recorder.episode(record, frames, {})
    recorder.close()
    return folder


async def test_a_recording_is_judged_once(recorded: Path) -> None:
    server = JudgeServer("simulated-phone", Errors(rate=0.2, seed=3))
    async with serving(server) as url:
        judge = spec(url, model={"samples": 3, "temperature": 1.0})
        found = await calibrate(recorded, judge)
        asked = server.requests
        again = await calibrate(recorded, judge)
        assert 0 < asked <= 58 and server.requests == asked
        assert again.found == found.found
        few = await calibrate(recorded, judge, limit=10)
        assert few.found.all.episodes + few.found.not_asked + few.without_screens == 10
    every = found.found.all
    assert every.episodes == 58 and found.without_screens == 1 and found.found.not_asked == 1
    assert every.true_positives + every.false_negatives == sum(
        solved(one) for number, one in enumerate(some(60, error_rate=0.4)) if number not in (7, 8)
    )
    # three votes err less than one, and one vote as often as it is asked to
    single, majority = found.found.by_voting["single"], found.found.by_voting["majority"]
    assert single.accuracy.value is not None and majority.accuracy.value is not None
    assert 0.65 < single.accuracy.value < 0.95 and majority.accuracy.value >= single.accuracy.value
    assert majority == every
    written = json.loads((recorded / "calibration" / "calibration.json").read_text())
    assert written["found"]["all"]["episodes"] in (8, 9, 10)  # the last one that was asked for
    assert not any(isinstance(value, float) and math.isnan(value) for value in written["found"]["all"].values())
    assert len(tables(found)) >= 5


async def test_a_judge_that_is_away_ends_it_early(recorded: Path) -> None:
    server = JudgeServer("simulated-phone", faults=Faults(status=401))
    async with serving(server) as url:
        with pytest.raises(CalibrationError, match="no verdict after 5 questions: .* 401"):
            await calibrate(recorded, spec(url, voting="any"))
        with pytest.raises(CalibrationError, match="no verdict after 2 questions: .* 401"):
            await calibrate(recorded, spec(url, voting="any"), limit=2)
    with pytest.raises(ConfigurationError, match="no recorded episodes in rollout"):
        await calibrate(recorded / "nothing", spec("http://127.0.0.1:1/v1"))


def test_the_command(recorded: Path, tmp_path: Path) -> None:
    async def serve_and(call: list[str]) -> tuple[int, str, str]:
        async with serving(JudgeServer("simulated-phone")) as url:
            arguments = [argument.replace("URL", url) for argument in call]
            (tmp_path / "judge.yaml").write_text(
                f"models:\n- url: {url}\n  model: simulated-phone\nprompt: simulated-phone\n"
            )
            result = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
            return result.exit_code, result.stdout, result.stderr

    code, out, err = asyncio.run(
        serve_and(["judge", "calibrate", str(recorded), "--judge", str(tmp_path / "judge.yaml"), "--output", "json"])
    )
    assert code == 0, err
    assert json.loads(out)["found"]["all"]["kappa"]["value"] == 1.0
    flags = ["--url", "URL", "--model", "simulated-phone", "--prompt", "simulated-phone", "--samples", "3"]
    code, out, err = asyncio.run(serve_and(["judge", "calibrate", str(recorded), *flags]))
    assert code == 0, err
    assert "judge against verifier" in out and "precision" in out and "by voting rule" in out
    code, _, err = asyncio.run(serve_and(["judge", "calibrate", str(recorded)]))
    assert code == 2 and "either --judge FILE, or --url URL" in err


def test_a_judge_of_a_file_is_read_like_every_other_file(tmp_path: Path) -> None:
    from tapforge_api import SpecError

    file = tmp_path / "judge.yaml"
    file.write_text("models:\n- url: http://127.0.0.1:1/v1\n  model: m\n  sampels: 3\n")
    with pytest.raises(SpecError, match="line 4: models\\[0\\].sampels: unknown field .*did you mean samples"):
        judge_spec(file, {})
    flags = {"url": "http://127.0.0.1:1/v1", "model": "m", "samples": 4, "api_key_env": "KEY", "voting": "any"}
    found = judge_spec(None, flags)
    assert found.models[0].temperature == 1.0 and found.models[0].api_key is not None and found.voting == "any"
