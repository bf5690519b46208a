"""A run that is looked at: its events, and from the first question about episodes on its index. Only reads the run.

Methods may be called from several threads; each answers with plain data for JSON, or raises NotThere, BadQuery or
RecordingError.
"""

from __future__ import annotations

import io
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from PIL import Image

from ..frames.frame import FrameError
from ..recording.frames import FrameStore
from ..recording.learner_tokens import LearnerTokenReader, LearnerTokens
from ..recording.reader import FRAMES, RecordingError
from ..records import EpisodeRecord
from ..run.folder import ROLLOUT, run_of
from ..viewer.letters import letters_of
from . import query
from .comparison import TaskResult, results
from .credits import Crediting, Rules, StepCredit
from .detail import Credits, answer_json, episode_json, in_order, step_json
from .figures import RunEvents
from .index import Index, recordings_of
from .overview import is_live, overview
from .stored import NotThere, read_episodes
from .texts import Texts

log = logging.getLogger(__name__)

#: sizes of frames that are remembered
_SIZES: Final = 20_000


class OpenRun:
    def __init__(self, folder: Path):
        """Raises ConfigurationError for a folder that is not a run's."""
        self.folder = folder
        self.run = run_of(folder)
        self._events, self._lock = RunEvents(folder), threading.RLock()
        self._index: Index | None = None
        self._crediting: Crediting | None = None
        self._texts = Texts(folder, self.run)
        self._learner = LearnerTokenReader(folder / ROLLOUT)
        self._stores: dict[str, FrameStore] = {}
        self._sizes: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._facets: tuple[int, dict[str, Any]] = (-1, {})
        self.trouble = ""

    def close(self) -> None:
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def stop(self) -> None:
        """Ends a refresh soon."""
        if self._index is not None:
            self._index.closing = True

    # --- kept up to date by one thread ---

    def work(self) -> bool:
        """Reads what the run has written since. True: there may be more to do at once."""
        if self._index is None or self._index.closing or self._crediting is None:
            return False
        events = self.events()
        per_update = self.run.spec.rollout.groups_per_update
        try:
            changed = self._index.refresh(per_update, events.version_before)
            self._crediting.begins = events.begins()
            last = events.update
            while not self._index.closing and self._crediting.write_next(last, per_update):
                changed = True
            self._learner.refresh()
            self.trouble = ""
        except (RecordingError, OSError, sqlite3.Error) as error:
            self.failed(error)
            return False
        return changed

    def failed(self, error: Exception) -> None:
        """Says what keeps the index from going on; it is tried again."""
        words = str(error) if isinstance(error, RecordingError | OSError) else f"{self.folder}: {error!r}"
        if self.trouble != words:
            log.warning("%s", words)
        self.trouble = words
        if self._index is not None:
            self._index.failed(error)

    @property
    def watched(self) -> bool:
        return self._index is not None

    @property
    def live(self) -> bool:
        return is_live(self.folder)

    # --- what is asked ---

    def events(self) -> RunEvents:
        with self._lock:
            self._events.refresh()
            return self._events

    def overview(self) -> dict[str, Any]:
        index = self._opened()
        sql = "select r.name as recording, outcome, count(*) as count from episodes e join recordings r on "
        found = index.select(f"{sql} r.id = e.recording group by 1, 2")
        outcomes: dict[str, dict[str, int]] = {}
        for row in found:
            outcomes.setdefault(row["recording"], {})[row["outcome"]] = row["count"]
        counts = {"outcomes": outcomes, "read": index.read_bytes, "all": index.all_bytes, "trouble": self.trouble}
        with self._lock:
            return overview(self.folder, self.run, self.events(), counts)

    def summary(self) -> dict[str, Any]:
        """The first screen without what the index counts."""
        with self._lock:
            return overview(self.folder, self.run, self.events(), {})

    def brief(self) -> dict[str, Any]:
        """For the list of runs: nothing of the index is asked."""
        with self._lock:
            whole, recent = self.summary(), self._events.value("rollout/success_rate", 5)
        names = ("run", "folder", "state", "update", "max_updates", "began", "last", "success", "baselines", "facts")
        return {name: whole[name] for name in names} | {"recent": recent}

    def figures(self, names: list[str]) -> dict[str, Any]:
        """Series of these names; without names the list of all figures."""
        with self._lock:
            events = self.events()
            return events.series(names) if names else {"figures": events.names()}

    def episodes(self, words: Iterable[tuple[str, str]]) -> dict[str, Any]:
        asked, index = query.read(words), self._opened()
        total = index.select(*asked.count())[0]["count"]
        rows = [query.as_row(row) for row in index.select(*asked.rows())]
        return {
            "total": total, "offset": asked.offset, "episodes": rows, "changes": index.changes,
            "read": index.read_bytes, "all": index.all_bytes, "trouble": self.trouble,
            "advantages": self._credits().rules.why,
        }  # fmt: skip

    def facets(self) -> dict[str, Any]:
        """Values that filters can have, with how many episodes have them."""
        index = self._opened()
        changes, found = self._facets
        if changes != index.changes:
            changes, all_of = index.changes, query.Query()
            names = ("recording", "template", "outcome", "reason", "phone")
            found = {name: [dict(row) for row in index.select(*all_of.facet(name))] for name in names}
            sql = "select distinct key from episodes, json_each(episodes.streams) where streams is not null"
            found["streams"] = [row["key"] for row in index.select(sql)]
            self._facets = changes, found
        return found

    def episode(self, recording: str, name: str) -> dict[str, Any]:
        """With all steps, and the names of its group's members."""
        record, facts = self._read(recording, name)
        members = self._members(recording, record)
        letters = letters_of(members, self._states)
        found = episode_json(record, partial(self.size, recording), self._credits_of(facts, name), letters, facts)
        found["members"] = [
            {"name": one.id, "outcome": one.outcome.value if one.outcome else "stopped", "steps": len(one.steps)}
            for one in in_order(members)
        ]
        return found

    def record(self, recording: str, name: str) -> tuple[EpisodeRecord, list[StepCredit]]:
        """An episode as it was recorded, with what its steps were worth in its update."""
        record, facts = self._read(recording, name)
        return record, list(self._credits_of(facts, name).values())

    def stores(self, recordings: Iterable[str]) -> list[FrameStore]:
        """Screens of these recordings."""
        with self._lock:
            return [self._store(recording) for recording in sorted(recordings)]

    def group(self, recording: str, name: str) -> dict[str, Any]:
        """Its episodes side by side."""
        names = self._opened().members(recording, name)
        if not names:
            raise NotThere(f"{recording} has no group {name!r}")
        members = in_order(read_episodes(self._opened(), recording, names))
        letters = letters_of(members, self._states)
        found = []
        for one in members:
            facts = self._facts(recording, one.id)
            credits = self._credits_of(facts, one.id)
            found.append(episode_json(one, partial(self.size, recording), credits, letters, facts))
        return {"group": name, "recording": recording, "task": found[0]["task"], "episodes": found}

    def step(self, recording: str, name: str, number: int) -> dict[str, Any]:
        """With its prompt, the tokens of its answer, and its state's key."""
        record, facts = self._read(recording, name)
        if not 0 <= number < len(record.steps):
            raise NotThere(f"episode {name!r} has no step {number}; it has {len(record.steps)}")
        step = record.steps[number]
        letters = letters_of(self._members(recording, record), self._states)
        credit = self._credits_of(facts, record.id).get((record.id, step.index))
        learner: tuple[int, LearnerTokens] | None = None
        damage = ""
        try:
            learner = self._learner.find(name, facts["update"]) if recording == ROLLOUT else None
        except RecordingError as error:  # the step itself can be shown
            damage = str(error)
        answer = answer_json(step, self._texts.each, learner)
        found = step_json(record, number, partial(self.size, recording), credit, letters)
        g = step.generation
        return {
            **found,
            "episode": {
                **facts, "id": record.id, "goal": record.task.goal, "steps": len(record.steps), "group": record.group,
                "outcome": record.outcome.value if record.outcome else "stopped", "template": record.task.template,
            },
            "prompt": self._texts.prompt(list(g.prompt_ids), list(step.frames)),
            "prompt_length": g.prompt_length,
            "answer": answer,
            "not_learned": damage or self._not_learned(recording, answer),
            "no_tokenizer": self._texts.why,
            "no_advantage": self._credits().rules.why,
            "state": {
                name: getattr(step, name) for name in ("state_key", "window", "ui_key", "frame_key", "ui_tree")
            },
            "frames": list(step.frames),
        }  # fmt: skip

    def results(self, recording: str) -> dict[str, TaskResult]:
        """By task, of a measurement."""
        found = results(self._opened(), recording)
        if not found:
            raise NotThere(f"{self.folder.name} has no valid episodes in {recording!r}, or they are not read yet")
        return found

    def frame(self, recording: str, name: str) -> tuple[bytes, str]:
        """Bytes and media type. Raises NotThere with why."""
        try:
            with self._lock:
                data = self._store(recording).get(name)
        except (FrameError, ValueError) as error:  # ValueError: no file has such a name
            raise NotThere(str(error)) from error
        kinds = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}
        return data, next((kind for start, kind in kinds.items() if data.startswith(start)), "application/octet-stream")

    def size(self, recording: str, name: str) -> tuple[int, int] | None:
        if name not in self._sizes:
            try:
                data, _ = self.frame(recording, name)
                with Image.open(io.BytesIO(data)) as image:
                    self._sizes[name] = image.size
            except (NotThere, OSError, Image.DecompressionBombError):
                return None
            while len(self._sizes) > _SIZES:
                self._sizes.popitem(last=False)
        return self._sizes[name]

    # --- the rest ---

    def _opened(self) -> Index:
        with self._lock:
            if self._index is None:
                self._index = Index(self.folder)
                self._crediting = Crediting(self._index, Rules.of(self.run))
            return self._index

    def _credits(self) -> Crediting:
        self._opened()
        assert self._crediting is not None
        return self._crediting

    @property
    def _states(self) -> Any:
        return self.run.spec.algorithm.states

    def _read(self, recording: str, name: str) -> tuple[EpisodeRecord, dict[str, Any]]:
        facts = self._facts(recording, name)
        return read_episodes(self._opened(), recording, [name])[0], facts

    def _facts(self, recording: str, name: str) -> dict[str, Any]:
        sql = (
            'select e.id, r.name as recording, "update", staleness, e.reward, advantage, oldest, newest, streams '
            "from episodes e join recordings r on r.id = e.recording where r.name = ? and e.name = ?"
        )
        found = self._opened().select(sql, (recording, name))
        if not found:
            raise NotThere(f"{recording} has no episode {name!r}, or it is not read yet")
        return query.as_row(found[0])

    def _not_learned(self, recording: str, answer: Mapping[str, Any]) -> str:
        """Why an answer has no numbers of the learner; "": it has them."""
        if answer["learned"] is not None or not answer["tokens"]:
            return ""
        why = "no update has trained on this answer, or what it computed was not kept"
        if recording != ROLLOUT:
            why = "no update trains on a measurement"
        elif not self._learner.exists:
            why = "an earlier version wrote this recording, or no update has trained yet"
        return f"The learner's log-probabilities and entropies are not recorded: {why}."

    def _members(self, recording: str, record: EpisodeRecord) -> list[EpisodeRecord]:
        return read_episodes(self._opened(), recording, self._opened().members(recording, record.group))

    def _credits_of(self, facts: Mapping[str, Any], name: str) -> Credits:
        found = self._credits().of_episodes([facts["id"]]).get(facts["id"], [])
        return {(name, credit.step): credit for credit in found}

    def _store(self, recording: str) -> FrameStore:
        if recording not in self._stores:
            folder = recordings_of(self.folder).get(recording)
            if folder is None:
                raise NotThere(f"there is no recording {recording!r}")
            self._stores[recording] = FrameStore(folder / FRAMES)
        return self._stores[recording]
