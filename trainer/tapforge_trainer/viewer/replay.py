"""`replay.html`: one file that shows what an agent saw, said and did, and what it was credited for.

Promises:
- The file opens from disk, loads nothing from anywhere (a content security policy says so) and works without scripts;
  scripts only filter.
- Each frame is in the file once. A frame of at most `LARGEST` pixels a side is shown byte for byte; a larger one is
  scaled down. A frame that can't be read is named in words on its step; nothing is drawn in its place. So is one that
  was never recorded, or removed, because the spec says so: that is not an error.
- All text of models, tasks and environments is escaped.
- Advantages are those that the update used (`batch.Credit`); where there is none, none is shown.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from tapforge_api.algorithm import StateKey
from tapforge_envs.protocol import Outcome

from ..batch import Credit
from ..frames.frame import FrameError
from ..recording.frames import NotRecorded
from ..records import EpisodeRecord, GroupRecord, StepRecord
from .gesture import Gesture, gesture_of
from .letters import letters_of
from .selection import KINDS, Kind, kinds, pairs_of, pick_groups, pick_pairs

#: pixels of the longer side from which frames are scaled down
LARGEST = 720
#: CSS pixels of a screen's longer side
SHOWN = 232


@dataclass(frozen=True, slots=True)
class Picture:
    """A frame of the page."""

    name: str
    uri: str
    width: int
    height: int
    #: width and height of the recorded frame, which is larger where the picture was shrunk for the page
    frame: tuple[int, int]

    @property
    def shown_width(self) -> int:
        return max(1, round(SHOWN * self.width / max(self.width, self.height)))

    @property
    def shown_height(self) -> int:
        return max(1, round(SHOWN * self.height / max(self.width, self.height)))

    @property
    def enlarged(self) -> bool:
        return max(self.width, self.height) < SHOWN


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a stream of rewards says of a step; `value` None: its verdict is missing."""

    stream: str
    value: float | None
    words: str


@dataclass(frozen=True, slots=True)
class StepView:
    record: StepRecord
    picture: Picture | None
    missing: str
    gesture: Gesture | None
    credit: Credit | None
    #: `missing` is not an error
    absent: bool = False
    #: letter of the state among the states of its group that were seen more than once
    letter: str = ""
    #: steps of the group in that state, itself included; whether they are compared is the estimator's business
    alike: int = 1
    verdicts: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class EpisodeView:
    record: EpisodeRecord
    steps: tuple[StepView, ...]

    @property
    def outcome(self) -> str:
        return self.record.outcome.value if self.record.outcome else "stopped"

    @property
    def reward(self) -> float | None:
        """Sum of the rewards that the update used."""
        rewards = [step.credit.reward for step in self.steps if step.credit]
        return sum(rewards) if rewards else None

    @property
    def advantage(self) -> float | None:
        parts = [step.credit.episode_advantage for step in self.steps if step.credit]
        return parts[0] if parts else None


@dataclass(frozen=True, slots=True)
class PairView:
    kind: Kind
    before: EpisodeView
    after: EpisodeView


@dataclass(frozen=True, slots=True)
class GroupView:
    record: GroupRecord
    episodes: tuple[EpisodeView, ...]
    successes: int
    valid: int


@dataclass(frozen=True)
class Replay:
    """What goes on the page. Evaluation episodes of before and after are paired by task; groups are of training."""

    title: str
    frame: Callable[[str], bytes]
    facts: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[EpisodeRecord] = ()
    after: Sequence[EpisodeRecord] = ()
    groups: Sequence[GroupRecord] = ()
    #: how many groups there were, if `groups` are chosen ones already
    groups_total: int | None = None
    credits: Iterable[Credit] = ()
    #: what makes two steps of a group the same state
    states: StateKey = "screen"
    #: what the recording has not, in words
    lacks: str = ""
    #: how the screens were recorded, if not as the model saw them
    lossy: str = ""
    max_pairs: int = 16
    max_groups: int = 6
    #: templates and tasks with what they came to, as summary.json has them (`tasks/figures.py`)
    practised: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: nothing was trained: the groups are episodes that were played by hand
    played: bool = False
    #: by which words the episodes of the groups were chosen; a group may lack others then, and keeps their order
    selection: str = ""


def write_replay(path: Path, replay: Replay) -> None:
    path.write_text(replay_html(replay), encoding="utf-8")


def replay_html(replay: Replay) -> str:
    # Not at module level: this module's types cost nothing where there is no jinja2.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    album = _Album(replay.frame)
    credits = {(credit.episode, credit.step): credit for credit in replay.credits}
    pairs = pairs_of(replay.before, replay.after)
    shown_pairs = [
        PairView(pair.kind, _episode(pair.before, album, credits, {}), _episode(pair.after, album, credits, {}))
        for pair in pick_pairs(pairs, replay.max_pairs)
    ]
    picked = pick_groups(replay.groups, replay.max_groups)
    if replay.selection:
        shown_groups = [_chosen(group, album, credits) for group in replay.groups]
    else:
        shown_groups = [_group(group, album, credits, replay.states) for group in picked]
    tasks = [pair.after.record.task for pair in shown_pairs] + [group.record.task for group in shown_groups]
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (here / "replay.js").read_text(encoding="utf-8")
    return environment.get_template("replay.html.j2").render(
        title=replay.title,
        facts=replay.facts,
        kinds=kinds(pairs),
        all_kinds=KINDS,
        pairs=shown_pairs,
        pairs_total=len(pairs),
        groups=shown_groups,
        groups_total=len(replay.groups) if replay.groups_total is None else replay.groups_total,
        templates=sorted({task.template for task in tasks}),
        outcomes=[*(outcome.value for outcome in Outcome), "stopped"],
        pictures=list(album.pictures.values()),
        missing=len(album.missing),
        absent=len(album.absent),
        lacks=replay.lacks,
        played=replay.played,
        selection=replay.selection,
        practised=replay.practised,
        lossy=replay.lossy,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


class _Album:
    """The frames of the page, each once."""

    def __init__(self, frame: Callable[[str], bytes]):
        self._frame = frame
        self.pictures: dict[str, Picture] = {}
        self.missing: dict[str, str] = {}
        #: left out or removed as the spec says
        self.absent: dict[str, str] = {}

    def why(self, sha256: str | None) -> str:
        """Why there is no picture."""
        if sha256 is None:
            return "the step has no frame"
        return self.missing.get(sha256) or self.absent[sha256]

    def get(self, sha256: str) -> Picture | None:
        if sha256 not in self.pictures and sha256 not in self.missing and sha256 not in self.absent:
            try:
                self.pictures[sha256] = _picture(f"f{len(self.pictures)}", self._frame(sha256))
            except NotRecorded as left_out:
                self.absent[sha256] = str(left_out)
            except (FrameError, UnidentifiedImageError) as error:
                self.missing[sha256] = f"frame {sha256[:12]} can't be shown: {error}"
        return self.pictures.get(sha256)


def _picture(name: str, data: bytes) -> Picture:
    with Image.open(io.BytesIO(data)) as image:
        width, height, kind = image.width, image.height, image.get_format_mimetype() or "image/png"
        frame = width, height
        if max(width, height) > LARGEST:
            scale = LARGEST / max(width, height)
            small = image.convert("RGB").resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            small.save(buffer, "JPEG", quality=85)
            data, kind, width, height = buffer.getvalue(), "image/jpeg", small.width, small.height
    return Picture(name, f"data:{kind};base64,{base64.b64encode(data).decode()}", width, height, frame)


def _episode(
    episode: EpisodeRecord,
    album: _Album,
    credits: Mapping[tuple[str, int], Credit],
    letters: Mapping[tuple[str, int], tuple[str, int]],
) -> EpisodeView:
    steps: list[StepView] = []
    for step in episode.steps:
        sha256 = step.frames[-1] if step.frames else None
        picture = album.get(sha256) if sha256 else None
        letter, alike = letters.get((episode.id, step.index), ("", 1))
        steps.append(
            StepView(
                record=step,
                picture=picture,
                missing="" if picture else album.why(sha256),
                absent=sha256 in album.absent,
                gesture=_gesture(step, picture),
                credit=credits.get((episode.id, step.index)),
                letter=letter,
                alike=alike,
                verdicts=_verdicts(episode, len(steps)),
            )
        )
    return EpisodeView(episode, tuple(steps))


def _verdicts(episode: EpisodeRecord, place: int) -> tuple[Verdict, ...]:
    """Of the step at this place: what is missing, has words, or counts."""
    if episode.rewards is None:
        return ()
    words = episode.rewards.words
    found = [
        Verdict(stream, values[place], words[stream][place] if stream in words else "")
        for stream, values in episode.rewards.streams.items()
    ]
    return tuple(one for one in found if one.words or one.value != 0.0)


def _gesture(step: StepRecord, picture: Picture | None) -> Gesture | None:
    if step.action is None:
        return None
    if picture is None:  # nothing to draw on, and no size that would make pixels of its coordinates
        return Gesture(str(step.action.get("type", "?")).replace("_", " "))
    return gesture_of(step.action, picture.width, picture.height, picture.frame)


def _chosen(group: GroupRecord, album: _Album, credits: Mapping[tuple[str, int], Credit]) -> GroupView:
    """In the order in which they were chosen, and without letters: states are those of whole groups."""
    views = tuple(_episode(episode, album, credits, {}) for episode in group.episodes)
    won = sum(episode.outcome is Outcome.SUCCESS for episode in group.episodes)
    return GroupView(group, views, won, sum(episode.valid for episode in group.episodes))


def _group(group: GroupRecord, album: _Album, credits: Mapping[tuple[str, int], Credit], key: StateKey) -> GroupView:
    valid = [episode for episode in group.episodes if episode.valid]
    letters = letters_of(group.episodes, key)
    views = [_episode(episode, album, credits, letters) for episode in group.episodes]
    order = {"success": 0, "failure": 1, "invalid": 2, "stopped": 3}
    views.sort(key=lambda view: (order[view.outcome], -(view.reward or 0.0), len(view.steps), view.record.id))
    successes = sum(episode.outcome is Outcome.SUCCESS for episode in valid)
    return GroupView(group, tuple(views), successes, len(valid))
