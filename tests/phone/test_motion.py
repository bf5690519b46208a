"""Screens that move: how a change goes, what is shown meanwhile, and the loop that waits for it on a real server."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import aiohttp
import pytest
from conftest import Server
from PIL import Image, ImageChops

from tapforge_api.environment import Settle
from tapforge_envs.clients.http import HttpServer, new_session
from tapforge_envs.clients.pictures import frame_of
from tapforge_envs.clients.settling import settle
from tapforge_envs.phone.motion import LATE, SLOW_RESPONSE, TRANSITION, Course, Motion, course, shown
from tapforge_envs.protocol import Frame

BEFORE, AFTER = Image.new("RGB", (90, 200), "white"), Image.new("RGB", (90, 200), "black")


def test_changes_are_drawn_from_the_seed_and_have_their_shares() -> None:
    motion = Motion(seed=3)
    drawn = [course(motion, "e", index, True) for index in range(4000)]
    assert drawn == [course(motion, "e", index, True) for index in range(4000)]
    assert drawn != [course(Motion(seed=4), "e", index, True) for index in range(4000)]
    shares = {kind: count / 4000 for kind, count in Counter(how.kind for how in drawn).items()}
    wanted = {"slow": 0.15, "late": 0.08, "loading": 0.12, "endless": 0.1, "transition": 0.55}
    assert shares == pytest.approx(wanted, abs=0.03)
    for how in drawn:
        assert how.content >= how.response + how.transition - 1e-9 and TRANSITION[0] <= how.transition <= TRANSITION[1]
        assert how.content <= max(LATE[1], SLOW_RESPONSE[1] + TRANSITION[1])


def test_what_changed_nothing_is_still() -> None:
    assert {course(Motion(), "e", index, False) for index in range(50)} == {Course("still")}


def differs(one: Image.Image, other: Image.Image) -> bool:
    return ImageChops.difference(one, other).getbbox() is not None


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("kind", ["transition", "slow", "late", "loading", "endless"])
def test_what_is_shown_after_an_action(kind: str, slides: bool) -> None:
    late = kind in ("late", "loading")
    how = Course(kind, 0.1, 0.2, 1.0 if late else 0.3, slides)  # type: ignore[arg-type]

    def at(elapsed: float) -> Image.Image:
        return shown(how, BEFORE, AFTER, elapsed)

    assert not differs(at(0.05), BEFORE)
    assert differs(at(0.2), BEFORE) and differs(at(0.2), AFTER), "half way"
    assert differs(at(0.25), at(0.2))
    assert differs(at(0.9), AFTER) == (late or kind == "endless")
    assert differs(at(0.9), at(0.8)) == (kind in ("loading", "endless")), "a spinner turns"
    assert differs(at(5.0), AFTER) == (kind == "endless")
    assert differs(at(5.1), at(5.0)) == (kind == "endless")
    assert BEFORE.getextrema() == ((255, 255),) * 3 and AFTER.getextrema() == ((0, 0),) * 3, "drawn over"


def test_a_motion_that_is_none_is_refused_in_words() -> None:
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--protocol", "mobileworld", "--motion"]
    said = subprocess.run([*command, '{"slow": 2}'], check=False, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2 and "slow" in said.stderr


SERIAL = {"device": "emulator-5554"}
#: with pauses that are long against the server's own
CAREFUL = Settle(min_seconds=0.3, quiet_seconds=1.2, unchanged_seconds=3, moving_seconds=6, max_seconds=40)


@pytest.mark.long
async def test_the_frame_that_is_waited_for_is_of_the_screen_that_stays(start_server: Callable[..., Server]) -> None:
    """Of the kinds that can be told by looking. The server knows which screen stays."""
    options = ("--protocol", "mobileworld", "--width", "180", "--height", "400", "--suites", "standard", "--slots", "4")
    port = start_server(*options, "--motion", '{"seed": 5, "late": 0}').port

    async def play(session: aiohttp.ClientSession, slot: int) -> Counter[str]:
        server = HttpServer(f"http://127.0.0.1:{port}/slot/{slot}", session, f"phone-{slot}")

        async def capture() -> Frame:
            asked = {**SERIAL, "return_b64": "true"}
            answer = await server.json("screenshot", "GET", "/screenshot", query=asked, seconds=30)
            return frame_of(base64.b64decode(answer["b64_png"]))

        task = {"task_name": "standard-train-0", "req_device": SERIAL["device"]}
        await server.json("init", "POST", "/task/init", body=task, seconds=30)
        frame, kinds = await capture(), Counter[str]()
        for app in ("mail", "settings", "", "notes", "contacts"):
            action = {"action_type": "open_app", "app_name": app} if app else {"action_type": "wait"}
            await server.json("step", "POST", "/step", body={**SERIAL, "action": action}, seconds=30)
            settled = await settle(capture, CAREFUL, before=frame)
            told = await server.json("motion", "GET", "/motion", query=SERIAL, seconds=30)
            assert told["settled"] and settled.end != "bound", (slot, app, told, settled.end, settled.seconds)
            frame = settled.frame
            kinds[told["kind"]] += 1
        return kinds

    async with new_session() as session:
        kinds = sum(await asyncio.gather(*(play(session, slot) for slot in range(4))), Counter[str]())
    assert kinds["transition"] and kinds["loading"] and kinds["slow"] and kinds["still"], kinds
