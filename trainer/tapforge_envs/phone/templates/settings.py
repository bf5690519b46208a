"""Tasks in the settings: switches, levels, choices, networks, what the phone is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random

from tapforge_envs.phone.apps.settings import NETWORKS, NOTIFIERS, RINGTONES, SLEEPS, SWITCHES
from tapforge_envs.phone.judge import Apps
from tapforge_envs.phone.tasks import Do, Errs, Params

from .making import Plan, Setup, chore, combine, impossible, question, taps

_HERE = ("settings",)
_OPEN = Do(app="settings")
_QUESTIONS = {
    "model": "Which model is this phone?",
    "version": "Which system version does this phone have?",
    "storage": "How many GB of storage are used on this phone?",
}


def _label(switch: str) -> str:
    return SWITCHES[switch][0]


def _turn_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield _OPEN
    yield from taps(f"page:{SWITCHES[params['switch']][1]}", f"switch:{params['switch']}")


def _two_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield _OPEN
    yield from taps(f"page:{SWITCHES[params['first']][1]}", f"switch:{params['first']}")
    if not errs():
        yield from taps("bar:back", f"page:{SWITCHES[params['second']][1]}", f"switch:{params['second']}")


def _two_wish(params: Params, apps: Apps) -> None:
    apps["settings"].update({params["first"]: True, params["second"]: False})


def _level_plan(params: Params, errs: Errs) -> Iterator[Do]:
    name, level = params["level"], int(params["to"])
    yield _OPEN
    yield Do(tap="page:display" if name == "brightness" else "page:sound")
    for distance in range(1, 4):

        def nearer(state: Apps, distance: int = distance) -> Do:
            now = state["apps"]["settings"][name]
            return Do(tap=f"{name}:{'more' if now < level else 'less'}")

        if distance == 3 and errs():
            return
        yield Do(late=nearer)


def _level_setup(apps: Apps, params: Params, rng: Random) -> None:
    level = int(params["to"])
    apps["settings"][params["level"]] = level + rng.choice([by for by in (-3, 3) if 0 <= level + by <= 10])


def _network_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield _OPEN
    yield from taps("page:network", f"network:{params['network']}")


def _in_range(apps: Apps, params: Params, rng: Random) -> None:
    others = [name for name in NETWORKS if name != params["network"]]
    found = [params["network"], *rng.sample(others, 3)]
    rng.shuffle(found)
    joined = rng.choice([name for name in found if name != params["network"]])
    apps["settings"].update(wifi=True, in_range=found, network=joined)


def _out_of_range(apps: Apps, params: Params, rng: Random) -> None:
    found = rng.sample([name for name in NETWORKS if name != params["network"]], 4)
    apps["settings"].update(wifi=True, in_range=found, network=found[0])


def _choice_plan(page: str, field: str) -> Plan:
    def plan(params: Params, errs: Errs) -> Iterator[Do]:
        yield _OPEN
        yield from taps(f"page:{page}", field, f"dialog:{params['choice']}")

    return plan


def _choice_setup(field: str, options: tuple[str, ...]) -> Setup:
    def setup(apps: Apps, params: Params, rng: Random) -> None:
        apps["settings"][field] = rng.choice([option for option in options if option != params["choice"]])

    return setup


def _mute_wish(params: Params, apps: Apps) -> None:
    apps["settings"]["muted"].append(params["app"])


def _mute_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield _OPEN
    yield from taps("page:notifications", f"notify:{params['app']}")


def _about_plan(params: Params, errs: Errs) -> Iterator[Do]:
    yield _OPEN
    yield Do(tap="page:about")


def _about(params: Params, apps: Apps) -> list[str]:
    own = apps["settings"]
    return [str(own["storage_used"] if params["what"] == "storage" else own[params["what"]])]


TEMPLATES = (
    chore(
        "turn_switch",
        combine(switch=tuple(SWITCHES), to=("on", "off")),
        lambda q: f"Turn {q['to']} {_label(q['switch'])}.",
        _HERE,
        _turn_plan,
        lambda q, apps: apps["settings"].update({q["switch"]: q["to"] == "on"}),
        setup=lambda apps, q, rng: apps["settings"].update({q["switch"]: q["to"] == "off"}),
        steps=10,
    ),
    chore(
        "two_switches",
        tuple({"first": a, "second": b} for a, b in permutations(("wifi", "dark", "location", "silent", "lock"), 2)),
        lambda q: f"Turn on {_label(q['first'])} and turn off {_label(q['second'])}.",
        _HERE,
        _two_plan,
        _two_wish,
        setup=lambda apps, q, rng: apps["settings"].update({q["first"]: False, q["second"]: True}),
    ),
    chore(
        "set_level",
        combine(level=("brightness", "volume"), to=tuple(str(n) for n in range(11))),
        lambda q: f"Set the {q['level']} to {q['to']}.",
        _HERE,
        _level_plan,
        lambda q, apps: apps["settings"].update({q["level"]: int(q["to"])}),
        setup=_level_setup,
    ),
    chore(
        "choose_ringtone",
        combine(choice=RINGTONES),
        lambda q: f"Make {q['choice']} the ringtone.",
        _HERE,
        _choice_plan("sound", "ringtone"),
        lambda q, apps: apps["settings"].update(ringtone=q["choice"]),
        setup=_choice_setup("ringtone", RINGTONES),
        steps=10,
    ),
    chore(
        "choose_timeout",
        combine(choice=SLEEPS),
        lambda q: f"Let the screen go off after {q['choice']}.",
        _HERE,
        _choice_plan("display", "sleep"),
        lambda q, apps: apps["settings"].update(sleep=q["choice"]),
        setup=_choice_setup("sleep", SLEEPS),
        steps=10,
        only="test",
    ),
    chore(
        "choose_text_size",
        combine(choice=("Small", "Large", "Largest")),
        lambda q: f"Change the text size to {q['choice'].lower()}.",
        _HERE,
        _choice_plan("display", "text_size"),
        lambda q, apps: apps["settings"].update(text_size=q["choice"]),
        steps=10,
        only="validation",
    ),
    chore(
        "mute_app",
        combine(app=NOTIFIERS),
        lambda q: f"Turn off the notifications of {q['app'].capitalize()}.",
        _HERE,
        _mute_plan,
        _mute_wish,
        steps=10,
    ),
    chore(
        "join_network",
        combine(network=NETWORKS),
        lambda q: f"Connect to the Wi-Fi network {q['network']}.",
        _HERE,
        _network_plan,
        lambda q, apps: apps["settings"].update(network=q["network"]),
        setup=_in_range,
        steps=10,
    ),
    impossible(
        "join_missing_network",
        combine(network=NETWORKS),
        lambda q: f"Connect to the Wi-Fi network {q['network']}.",
        _HERE,
        lambda q, errs: iter((_OPEN, Do(tap="page:network"))),
        setup=_out_of_range,
    ),
    question(
        "ask_about_phone",
        combine(what=tuple(_QUESTIONS)),
        lambda q: _QUESTIONS[q["what"]],
        _HERE,
        _about_plan,
        _about,
        steps=8,
    ),
)
