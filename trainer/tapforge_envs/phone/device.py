"""The phone itself: one JSON state, gestures in, screens out. Synchronous and deterministic; the server adds I/O.

- The state is one JSON document: `nav` (foreground app, page, back stack), `apps` (each app's own content), `opened`
  (apps brought to the front, in order), `ended` and `answer`. Screens are a function of it; nothing else is remembered.
- A `PhoneImage` is a set of apps with a launcher, as a firmware image is; `quickstart` and `standard` are two.
- A `Shell` is what an image does around its apps; the quickstart image has none.
- An app decides in `act(state, event)` what a gesture does and says whether it had an effect.
- The state key is exact: foreground, page, visible widgets without volatile parts, and the part of the state that the
  task's judge looks at, as far as it was changed. Equal keys of a task have equal futures as far as its score goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from tapforge_envs import protocol as p

from .draw import frame
from .screen import Color, Screen
from .tree import ui_tree

State = dict[str, Any]
#: exact: a state key; ui: a UI tree, as phones have it; frame: nothing but the frame
Offers = Literal["exact", "ui", "frame"]

HOME = "home"


@dataclass(frozen=True, slots=True)
class Event:
    """A gesture as an app sees it: `target` is the id of the widget that was hit, or "" where it hit none."""

    kind: Literal["tap", "long_press", "double_tap", "type", "enter", "scroll", "swipe", "drag", "key"]
    target: str = ""
    text: str = ""
    direction: str = ""


@dataclass(frozen=True, slots=True)
class App:
    name: str
    glyph: str
    color: Color
    #: the app's content in a fresh phone
    content: Callable[[Random], State]
    screen: Callable[[State], Screen]
    #: changes the state; returns whether the event had an effect
    act: Callable[[State, Event], bool]
    #: called when the app leaves the foreground (drops drafts, ...)
    leave: Callable[[State], None] | None = None


@dataclass(frozen=True, slots=True)
class Shell:
    """What a phone does around its apps."""

    #: adds the part outside the apps' content to a fresh state
    fresh: Callable[[State, Random], None]
    #: called after an app came to the front
    opened: Callable[[State, str], None]
    #: called before each action
    tick: Callable[[State], None]
    #: what the back key closes inside the app; False leaves the app
    back: Callable[[State], bool]
    #: what can't be seen but changes what the next actions do; part of the state key
    hidden: Callable[[State], Any]
    #: the app that lists the recent ones
    switcher: str


@dataclass(frozen=True)
class PhoneImage:
    name: str
    #: apps["home"] is the launcher
    apps: Mapping[str, App]
    shell: Shell | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """What a judge compares."""

    before: State
    after: State
    answer: str | None
    #: "answer" or that of terminate; None: the agent didn't end the episode
    status: str | None

    @property
    def declared_done(self) -> bool:
        """An answer says so as well: families such as UI-TARS end every task with a text."""
        return self.status in ("success", "answer")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a task makes of a fresh phone and how it is judged. Built by a template for given parameters."""

    setup: Callable[[State, Random], None]
    judge: Callable[[Trial], p.Score]
    #: the part of the state that the judge looks at, as plain JSON
    judged: Callable[[State], Any]


def fresh_state(image: PhoneImage, seed: int) -> State:
    rng = Random(f"{image.name}:{seed}")
    state: State = {
        "seed": seed,
        "nav": {"app": HOME, "page": "", "stack": []},
        "apps": {name: app.content(rng) for name, app in image.apps.items()},
        "opened": [],
        "ended": None,
        "answer": None,
    }
    if image.shell is not None:
        image.shell.fresh(state, rng)
    return state


def open_app(image: PhoneImage, state: State, name: str) -> None:
    """Brings an app to the front at its first page."""
    _leave(image, state)
    state["nav"] = {"app": name, "page": "", "stack": []}
    if name != HOME:
        state["opened"].append(name)
    if image.shell is not None:
        image.shell.opened(state, name)


def open_page(state: State, page: str) -> None:
    """Goes one page deeper inside the foreground app."""
    state["nav"]["stack"].append(state["nav"]["page"])
    state["nav"]["page"] = page


def _leave(image: PhoneImage, state: State) -> None:
    app = image.apps[state["nav"]["app"]]
    if app.leave is not None:
        app.leave(state)


def _changes(before: Any, now: Any) -> Any:
    """Within a task, states differ by what was changed: the entries of a document that are not as they were."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return now
    return {name: now.get(name) for name in {*before, *now} if now.get(name) != before.get(name)}


class Phone:
    """One phone of `width` x `height` pixels. `offers`: what its observations tell of the state beside the app."""

    def __init__(self, image: PhoneImage, width: int, height: int, offers: Offers = "exact"):
        self.image = image
        self.offers = offers
        self.width = width
        self.height = height
        self._install(fresh_state(image, 0), None)

    def _install(self, state: State, rules: Rules | None) -> None:
        self.state = state
        self.rules = rules
        self.before: State = json.loads(json.dumps(state))

    def snapshot(self) -> str:
        """Everything the phone is at this moment, as JSON. The task's rules are not in it: they belong to the task."""
        return json.dumps({"image": self.image.name, "state": self.state, "before": self.before})

    def restore(self, snapshot: str) -> p.Observation:
        """Goes back (or over) to a snapshot of a phone with the same image and task."""
        saved = json.loads(snapshot)
        if saved["image"] != self.image.name:
            raise ValueError(f"the snapshot is of image {saved['image']!r}, this phone has {self.image.name!r}")
        self.state, self.before = saved["state"], saved["before"]
        return self.observe()

    def fork(self) -> Phone:
        """A second phone at the same moment of the same task."""
        other = Phone(self.image, self.width, self.height, self.offers)
        other.rules = self.rules
        other.restore(self.snapshot())
        return other

    def begin(self, seed: int, rules: Rules) -> None:
        """A fresh phone with a task. Draws nothing."""
        state = fresh_state(self.image, seed)
        rules.setup(state, Random(f"setup:{seed}"))
        self._install(state, rules)

    def reset(self, seed: int, rules: Rules) -> p.Observation:
        self.begin(seed, rules)
        return self.observe()

    def screen(self) -> Screen:
        return self.image.apps[self.state["nav"]["app"]].screen(self.state)

    def observe(self) -> p.Observation:
        screen, nav = self.screen(), self.state["nav"]
        seen = p.Observation(frame(screen, self.width, self.height), nav["app"])
        if self.offers == "exact":
            return replace(seen, state_key=self._key(screen))
        if self.offers == "ui":
            return replace(seen, ui_tree=ui_tree(screen, nav["app"], self.width, self.height))
        return seen

    def clear(self, app: str) -> None:
        """Gives an app the content that it has in a fresh phone of the same seed; it is closed if it was in front."""
        if self.state["nav"]["app"] == app:
            open_app(self.image, self.state, HOME)
        self.state["apps"][app] = fresh_state(self.image, self.state["seed"])["apps"][app]

    def state_key(self) -> str:
        """Equal for equal situations of the same task."""
        return self._key(self.screen())

    def _key(self, screen: Screen) -> str:
        nav = self.state["nav"]
        judged = _changes(self.rules.judged(self.before), self.rules.judged(self.state)) if self.rules else None
        parts = [nav["app"], nav["page"], screen.identity(), judged, self.state["ended"]]
        if self.image.shell is not None:
            parts.append(self.image.shell.hidden(self.state))
        key = json.dumps(parts, sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    def step(self, action: p.Action) -> p.StepResult:
        note = self.act(action)
        return p.StepResult(self.observe(), done=self.state["ended"] is not None, note=note)

    def act(self, action: p.Action) -> str:
        """Carries out an action, draws nothing; returns a note, empty when the action had an effect."""
        if self.state["ended"] is not None:
            return "the episode has ended"
        if self.image.shell is not None:
            self.image.shell.tick(self.state)
        return "" if self._act(action) else f"{action.type} had no effect"

    def insert(self, text: str) -> str:
        """What an input method writes into the field that has the focus: here a line end is a character and presses
        nothing, unlike in the action `Type`. Returns a note as `act` does."""
        if self.state["ended"] is not None:
            return "the episode has ended"
        if self.image.shell is not None:
            self.image.shell.tick(self.state)
        return "" if self._send(Event("type", text=text)) else "type had no effect"

    def evaluate(self) -> p.Score:
        if self.rules is None:
            raise p.EnvironmentFault("evaluate was called before a task was set by reset")
        return self.rules.judge(Trial(self.before, self.state, self.state["answer"], self.state["ended"]))

    # --- what actions do ---

    def _act(self, action: p.Action) -> bool:
        state = self.state
        match action:
            case p.Tap():
                return self._gesture("tap", action.x, action.y)
            case p.LongPress():
                return self._gesture("long_press", action.x, action.y)
            case p.DoubleTap():
                return self._gesture("double_tap", action.x, action.y)
            case p.Swipe() | p.Drag():
                across, down = action.x2 - action.x, action.y2 - action.y
                if abs(across) > abs(down):
                    direction = "left" if across < 0 else "right"
                else:
                    direction = "up" if down < 0 else "down"
                return self._gesture(action.type, action.x, action.y, direction)
            case p.Scroll():
                return self._gesture("scroll", action.x, action.y, action.direction)
            case p.Type():
                return self._type(action.text)
            case p.Enter():
                return self._send(Event("enter"))
            case p.Key():
                return self._send(Event("key", text=action.name))
            case p.OpenApp():
                return self._launch(action.name)
            case p.Home():
                return self._home()
            case p.Back():
                return self._back()
            case p.AppSwitch():
                return self._switch()
            case p.Answer():
                state["ended"], state["answer"] = "answer", action.text
                return True
            case p.Terminate():
                state["ended"] = action.status
                return True
            case p.Wait():
                return True
            case _:
                return False

    def _type(self, text: str) -> bool:
        events = [Event("type", text=s.text) if isinstance(s, p.Type) else Event("enter") for s in p.keystrokes(text)]
        changed = [self._send(event) for event in events]
        return any(changed)

    def _launch(self, name: str) -> bool:
        """Opens an app by its name as users write it; the launcher and what has no icon can't be opened by name."""
        wanted = name.strip().casefold()
        if wanted == HOME or wanted not in self.image.apps or not self.image.apps[wanted].glyph:
            return False
        open_app(self.image, self.state, wanted)
        return True

    def _home(self) -> bool:
        nav = self.state["nav"]
        if nav["app"] == HOME and not nav["page"]:
            return False
        open_app(self.image, self.state, HOME)
        return True

    def _back(self) -> bool:
        nav = self.state["nav"]
        if self.image.shell is not None and self.image.shell.back(self.state):
            return True
        if nav["stack"]:
            nav["page"] = nav["stack"].pop()
            return True
        if nav["app"] == HOME:
            return False
        open_app(self.image, self.state, HOME)
        return True

    def _switch(self) -> bool:
        shell = self.image.shell
        if shell is None or self.state["nav"]["app"] == shell.switcher:
            return False
        open_app(self.image, self.state, shell.switcher)
        return True

    def _gesture(self, kind: Any, x: float, y: float, direction: str = "") -> bool:
        # The hit point is the centre of the pixel, so that drawing and hit testing agree at every size.
        at_x = (p.pixel(x, self.width) + 0.5) / self.width
        at_y = (p.pixel(y, self.height) + 0.5) / self.height
        widget = self.screen().at(at_x, at_y)
        return self._send(Event(kind, widget.id if widget else "", direction=direction))

    def _send(self, event: Event) -> bool:
        before = self.state["nav"]["app"]
        effect = self.image.apps[before].act(self.state, event)
        # an app asks for another one by setting nav["open"], for a key of the phone by setting nav["press"]
        wanted = self.state["nav"].pop("open", None)
        if wanted is not None:
            open_app(self.image, self.state, wanted)
        pressed = self.state["nav"].pop("press", None)
        if pressed is not None:
            return {"home": self._home, "back": self._back, "recents": self._switch}[pressed]()
        return effect
