"""Every built-in adapter's dialect, by name and model family, and what it can write: for tests of all of them."""

from dataclasses import dataclass

from hypothesis import strategies as st

from tapforge_envs.clients.pyautogui_text import KEYS
from tapforge_envs.protocol import (
    Action,
    Answer,
    AppSwitch,
    AskUser,
    Back,
    DoubleTap,
    Drag,
    Enter,
    Home,
    Hotkey,
    Key,
    LongPress,
    MiddleClick,
    Move,
    OpenApp,
    RightClick,
    Scroll,
    Swipe,
    Tap,
    Terminate,
    TripleClick,
    Type,
    Wait,
)
from tapforge_trainer.agents import aguvis, guiowl, maiui, qwen3vl, qwen25vl, uitars
from tapforge_trainer.agents.coordinates import Plane
from tapforge_trainer.agents.dialect import Dialect


@dataclass(frozen=True)
class Case:
    dialect: Dialect
    words: frozenset[type]

    @property
    def name(self) -> str:
        return f"{self.dialect.name}/{type(self.dialect.coordinates).__name__}"


PHONE = {Tap, LongPress, Type, OpenApp, Wait, Answer, Terminate, Home, Back}
TOOL_PHONE = frozenset(PHONE | {DoubleTap, Swipe, Key, AskUser, AppSwitch, Enter})
TOOL_COMPUTER = frozenset(
    {Tap, RightClick, MiddleClick, DoubleTap, TripleClick, Move, Drag, Scroll, Type, Key, Hotkey, Enter, Wait, Answer}
    | {Terminate}
)
MAI = frozenset(PHONE | {DoubleTap, Swipe, Drag, AskUser, AppSwitch, Enter})
TARS_PHONE = frozenset(PHONE | {Scroll, Drag})
TARS_COMPUTER = frozenset({Tap, DoubleTap, RightClick, Move, Drag, Scroll, Type, Hotkey, Key, Enter, Wait, Answer})
AGUVIS = frozenset(PHONE | TOOL_COMPUTER | {Swipe})

CASES = [
    Case(qwen3vl.MOBILE, TOOL_PHONE),
    Case(qwen3vl.COMPUTER, TOOL_COMPUTER),
    Case(qwen25vl.MOBILE, TOOL_PHONE),
    Case(qwen25vl.COMPUTER, TOOL_COMPUTER),
    Case(maiui.DIALECT, MAI),
    Case(guiowl.of_model("gui-owl", "qwen3_vl"), TOOL_PHONE),
    Case(guiowl.of_model("gui-owl", "qwen2_5_vl"), TOOL_PHONE),
    Case(guiowl.of_model("gui-owl-computer", "qwen3_vl"), TOOL_COMPUTER),
    Case(guiowl.of_model("gui-owl-computer", "qwen2_5_vl"), TOOL_COMPUTER),
    Case(uitars.of_model("ui-tars", "qwen2_vl"), TARS_PHONE),
    Case(uitars.of_model("ui-tars", "qwen2_5_vl"), TARS_PHONE),
    Case(uitars.of_model("ui-tars-computer", "qwen2_5_vl"), TARS_COMPUTER | {Terminate}),
    Case(aguvis.DIALECT, AGUVIS),
]

# --- what a family can write, so that it reads the same back ----------------------------------------------------------

#: what could be taken for a part of some answer format
TROUBLE = ["<tool_call>", "</tool_call>", "<think>", "</think>", "</thinking>", "<|im_end|>", "<|recipient|>os\n", "'"]
TROUBLE += [
    "\ufffd",
    "\\u003c",
    "<",
    '"',
    "\\",
    "\\n",
    "\n",
    "')",
    "Action: wait()\n",
    "\nAction: wait()",
    ")\n\nclick(",
]
TROUBLE += ["pyautogui.click(1, 2)\n", "<|box_start|>"]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(TROUBLE), max_size=6).map("".join)
_KEY = st.sampled_from(sorted(KEYS - {"enter"})) | st.sampled_from("abcz019+-,.;:/\\'\"()[]<>=_~!?")


def actions(case: Case, plane: Plane) -> st.SearchStrategy[Action]:
    """Actions that the family has words for, at places that it can say."""
    coordinates = plane.coordinates

    def side(pixels: int) -> st.SearchStrategy[float]:
        return st.floats(0, 1).map(lambda x: coordinates.read(coordinates.write(x, pixels), pixels, "x"))

    x, y = side(plane.width), side(plane.height)
    name = case.dialect.name
    tool = case.dialect.schema is not None and name != "mai-ui"
    seconds = st.floats(0.001, 60) if tool and not name.endswith("computer") else st.just(1.0)
    waits = st.floats(0, 60) if tool else st.integers(0, 60).map(float) if name == "aguvis" else st.just(1.0)
    waits = st.just(5.0) if name.startswith("ui-tars") else waits
    ways = st.sampled_from(["up", "down", "left", "right"])
    answers = TEXTS.filter(str.strip) if name.startswith("ui-tars") else TEXTS
    statuses = ["success", "infeasible"] if name.startswith("ui-tars") else ["success", "failure", "infeasible"]
    notches = st.none() if name.startswith("ui-tars") else st.integers(1, 100)
    swipes: st.SearchStrategy[Action] = st.builds(Swipe, x=x, y=y, x2=x, y2=y)
    if name == "mai-ui":
        swipes = st.builds(maiui.stroke, x, y, st.sampled_from([(0, 1), (0, -1), (1, 0), (-1, 0)]))
    keys = TEXTS.map(lambda text: text[:64]) if Home in case.words and name != "aguvis" else _KEY
    by_type: dict[type, st.SearchStrategy[Action]] = {
        **{kind: st.builds(kind, x=x, y=y) for kind in (Tap, DoubleTap, RightClick, MiddleClick, TripleClick, Move)},
        LongPress: st.builds(LongPress, x=x, y=y, seconds=seconds),
        Swipe: swipes,
        Drag: st.builds(Drag, x=x, y=y, x2=x, y2=y),
        Scroll: st.builds(Scroll, direction=ways, x=x, y=y, notches=notches),
        Type: st.builds(Type, text=TEXTS),
        Key: st.builds(Key, name=keys),
        Hotkey: st.builds(Hotkey, keys=st.lists(_KEY, min_size=2, max_size=4).filter(_quotable).map(tuple)),
        OpenApp: st.builds(OpenApp, name=TEXTS.map(lambda text: text[:200])),
        Wait: st.builds(Wait, seconds=waits),
        Answer: st.builds(Answer, text=answers),
        AskUser: st.builds(AskUser, text=TEXTS),
        Terminate: st.builds(Terminate, status=st.sampled_from(statuses)),
        **{kind: st.just(kind()) for kind in (Home, Back, AppSwitch, Enter)},
    }
    return st.one_of(*(by_type[kind] for kind in sorted(case.words, key=lambda kind: kind.__name__)))


def _quotable(keys: list[str]) -> bool:
    return not ("'" in keys and '"' in keys)
