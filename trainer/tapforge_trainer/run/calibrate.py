"""`tapforge judge calibrate`: a judge against the verifier, on the episodes that a run has recorded.

- Judged are episodes that ended with a verdict of the verifier and whose screens were recorded as the model saw them;
  the number of others is reported. Nothing is played and nothing is learned.
- Episodes that ran out of steps or gave no answer that is an action are failures whatever a judge says: it is not asked
  about them, as in a run.
- Verdicts are a journal in FOLDER/calibration: started again, the command asks only for those that it doesn't have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tapforge_api import SpecError
from tapforge_api.document import parse
from tapforge_api.errors import Problem, problems_of
from tapforge_api.judge import JudgeSpec
from tapforge_envs.protocol import Outcome, Reason

from ..frames.frame import FrameError
from ..judges.calibration import Agreement, Calibration, Compared, Rate, calibration
from ..judges.endpoint import Endpoints
from ..judges.journal import VERDICTS, VerdictJournal
from ..judges.judge import Judge, JudgeError, Trajectory, VerdictMissing, Vote, judge_of
from ..recording.frames import RecordedFrames
from ..recording.reader import FRAMES, Recording
from ..records import EpisodeRecord
from .assembly import ConfigurationError
from .folder import EVALUATION, ROLLOUT

CALIBRATION: Final = "calibration"
REPORT: Final = "calibration.json"
#: reasons after which a judge is asked
_ASKED: Final = (Reason.DONE, Reason.DECLARED_INFEASIBLE, Reason.VERDICT_MISSING)
_VERIFIED: Final = (Outcome.SUCCESS, Outcome.FAILURE)
#: episodes that are judged between two writes of the journal
_CHUNK: Final = 64
#: verdicts that may be missing before the first one comes
_PATIENCE: Final = 5


class CalibrationError(Exception):
    """The judge gives no verdicts. The message is that of the first one."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    found: Calibration
    #: episodes without all their screens
    without_screens: int
    usage: Mapping[str, float]
    #: why verdicts are missing, some of them
    missing: tuple[str, ...]


def judge_spec(file: Path | None, flags: Mapping[str, Any]) -> JudgeSpec:
    """Of a YAML file, or of the command's flags. Raises SpecError and OSError."""
    source, lines = str(file), dict[tuple[str | int, ...], int]()
    if file is not None:
        documents = parse(file.read_text(encoding="utf-8"), source)
        if len(documents) != 1 or not isinstance(documents[0].data, dict):
            raise SpecError(source, [Problem("expected one object, a judge with `models`")])
        data, lines = documents[0].data, documents[0].lines
    else:
        source, samples = "the judge", flags.get("samples", 1)
        model = {name: flags[name] for name in ("url", "model")} | {"samples": samples}
        model["temperature"] = flags.get("temperature", float(samples > 1))
        if "api_key_env" in flags:
            model["apiKey"] = {"environment": flags["api_key_env"]}
        data = {"models": [model]} | {name: flags[name] for name in ("prompt", "voting") if name in flags}
    try:
        return JudgeSpec.model_validate_json(json.dumps(data, default=str), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        places = {path: f"line {line}" for path, line in lines.items()}
        raise SpecError(source, problems_of(error, JudgeSpec, places)) from error


async def calibrate(
    folder: Path,
    spec: JudgeSpec,
    *,
    part: str = ROLLOUT,
    limit: int | None = None,
    seed: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] | None = None,
) -> Calibrated:
    """`part`: rollout or evaluation. `limit`: episodes at most, spread evenly over the run. `report` gets how many of
    how many are done, `say` what is waited for. Raises ConfigurationError, RecordingError, JournalError and
    CalibrationError."""
    assert part in (ROLLOUT, EVALUATION)
    if own := [model.model for model in (*spec.models, *spec.cascade) if model.url is None]:
        raise ConfigurationError(
            f"the judge's model {own[0]} has no url, and `run` and `collect` alone serve models of spec.models: start "
            f"it yourself, such as with `vllm serve MODEL --served-model-name {own[0]}`, and give the judge its url"
        )
    recording = Recording(folder / part)
    if not recording.exists:
        raise ConfigurationError(f"{folder} has no recorded episodes in {part}: name the folder of a run")
    episodes = [one for one in recording.episodes() if one.verified in _VERIFIED and one.steps]
    if limit is not None and len(episodes) > limit:
        episodes = [episodes[place * len(episodes) // limit] for place in range(limit)]
    target = folder / CALIBRATION
    target.mkdir(exist_ok=True)
    journal, endpoints = VerdictJournal(target / VERDICTS), Endpoints(say)
    try:
        try:
            judge = judge_of(spec, "task", journal=journal, endpoints=endpoints)
        except JudgeError as error:
            raise ConfigurationError(str(error)) from error
        try:
            asking = _Asking(recording, judge)
            compared: list[Compared] = []
            for start in range(0, len(episodes), _CHUNK):
                chunk = episodes[start : start + _CHUNK]
                compared += await asking.chunk(chunk)
                await asyncio.to_thread(journal.flush)
                report(start + len(chunk), len(episodes))
        finally:
            await endpoints.close()
    finally:
        journal.close()
    asking.check_any()
    if not compared:
        raise ConfigurationError(
            f"{folder} has no valid episode with all its screens in {part} ({asking.without_screens} without): "
            f"{recording.frames.lacks or 'play more'}"
        )
    found = Calibrated(
        calibration(compared, seed=seed), asking.without_screens, judge.usage.as_json(), tuple(asking.missing[:5])
    )
    (target / REPORT).write_text(json.dumps(asdict(found), indent=2) + "\n")
    return found


class _Asking:
    def __init__(self, recording: Recording, judge: Judge):
        self._recording, self._judge = recording, judge
        self._verdicts = 0
        #: a recording is read by one thread at a time
        self._reading = asyncio.Lock()
        self.without_screens = 0
        self.missing: list[str] = []

    async def chunk(self, episodes: Sequence[EpisodeRecord]) -> list[Compared]:
        tasks = [asyncio.create_task(self.compared(episode)) for episode in episodes]
        try:
            return [one for one in await asyncio.gather(*tasks) if one is not None]
        finally:  # of those that are still under way when one has failed
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def compared(self, episode: EpisodeRecord) -> Compared | None:
        """None: its screens aren't there."""
        verified = episode.verified is Outcome.SUCCESS
        about = (episode.task.template, len(episode.steps), verified)
        if episode.reason not in _ASKED:
            return Compared(*about, verdict=None, asked=False)
        try:
            async with self._reading:
                trajectory = await asyncio.to_thread(self._trajectory, episode)
        except FrameError:
            self.without_screens += 1
            return None
        try:
            verdict = await self._judge.task(trajectory)
        except VerdictMissing as why:
            self.missing.append(str(why))
            if len(self.missing) >= _PATIENCE:
                self.check_any()
            return Compared(*about, verdict=None, votes=_deciding(why.votes))
        self._verdicts += 1
        return Compared(*about, verdict=verdict.value == 1.0, votes=_deciding(verdict.votes))

    def check_any(self) -> None:
        """Raises CalibrationError where questions were asked and none had a verdict."""
        if self.missing and not self._verdicts:
            raise CalibrationError(f"no verdict after {len(self.missing)} questions: {self.missing[0]}")

    def _trajectory(self, episode: EpisodeRecord) -> Trajectory:
        return Trajectory.of(episode, RecordedFrames(self._recording.folder / FRAMES, episode.frames))


def _deciding(votes: Sequence[Vote]) -> tuple[float | None, ...]:
    """Those of the models that decide."""
    cascaded = any(vote.cascade for vote in votes)
    return tuple(vote.value for vote in votes if vote.cascade == cascaded)


# --- as a table -------------------------------------------------------------------------------------------------------


def tables(found: Calibrated) -> list[Table | str]:
    """What the console shows."""
    calibration = found.found
    shown: list[Table | str] = [_table("judge against verifier", {"all": calibration.all})]
    for title, parts in (
        ("by voting rule, of the same votes", calibration.by_voting),
        ("by template", calibration.by_template),
        ("by length", calibration.by_length),
    ):
        if len(parts) > 1:
            shown.append(_table(title, parts))
    shown += _words(found)
    return shown


def _table(title: str, rows: Mapping[str, Agreement]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("episodes", "TP", "FP", "FN", "TN", "missing"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("precision", "recall", "kappa"):
        table.add_column(name, no_wrap=True)
    for name, one in rows.items():
        counts = (
            one.episodes,
            one.true_positives,
            one.false_positives,
            one.false_negatives,
            one.true_negatives,
            one.missing,
        )
        table.add_row(name, *map(str, counts), *map(_rate, (one.precision, one.recall, one.kappa)))
    return table


def _rate(rate: Rate) -> str:
    if rate.value is None:
        return "-"
    reach = "" if rate.interval is None else f" [{rate.interval.low:.2f}, {rate.interval.high:.2f}]"
    return f"{rate.value:.2f}{reach}"


def _words(found: Calibrated) -> list[str]:
    words = []
    gain = found.found.gain
    if gain is not None:
        reach = gain.false_positives_interval
        within = "" if reach is None else f" [{100 * reach.low:+.1f}, {100 * reach.high:+.1f}]"
        words.append(
            f"gain, last third less first: {100 * gain.by_judge:+.1f} points by the judge, "
            f"{100 * gain.by_verifier:+.1f} by the verifier; false positives explain "
            f"{100 * gain.false_positives:+.1f}{within}, false negatives {100 * (0.0 - gain.false_negatives):+.1f}"
        )
        if gain.at_most_false is not None:
            words.append(
                f"of the last third's successes by the judge, at most {100 * gain.at_most_false:.1f} % are false"
            )
    if found.found.not_asked:
        words.append(f"{found.found.not_asked} episodes were not asked about: they failed by limits of the run")
    if found.without_screens:
        words.append(f"{found.without_screens} episodes were left out: their screens are not recorded as they were")
    used = found.usage
    words.append(
        f"{used['requests']:.0f} requests, {used['prompt_tokens']:,.0f} prompt and {used['answer_tokens']:,.0f} answer "
        f"tokens, {used['money']:.2f} of money; {used['cached']:.0f} verdicts were there already"
    )
    words += [f"missing: {why}" for why in found.missing]
    return words


def as_json(found: Calibrated) -> dict[str, Any]:
    return asdict(found)
