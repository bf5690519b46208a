"""What clients rely on: fences, idempotent steps, refusals in words, faults that repeat, a clean end."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from tapforge_envs.phone import catalog
from tapforge_envs.phone.faults import FAULTS, Fault, latency
from tapforge_envs.phone.server import main
from tapforge_envs.protocol import Task
from tapforge_envs.wire import decode_step

TASK = catalog.tasks("quickstart", "train").sample(0, 0)
HOME = {"type": "home"}


async def post(url: str, call: str, **body) -> tuple[int, bytes]:
    deadline = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(timeout=deadline) as session, session.post(f"{url}/{call}", json=body) as answer:
        return answer.status, await answer.read()


async def set_faults(url: str, *faults: dict) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/faults", json=list(faults)) as answer:
        assert answer.status == 200, await answer.text()


async def begin(url: str, episode: str, task: Task = TASK) -> bytes:
    status, body = await post(url, "reset", episode=episode, task=task.model_dump())
    assert status == 200, body
    return body


def open_first_app(task: Task) -> dict:
    """A tap that changes the first screen."""
    phone = catalog.phone_for("quickstart", 96, 160)
    phone.reset(task.seed, catalog.rules_of(task))
    x, y, wide, high = phone.screen().widgets[0].box
    return {"type": "tap", "x": x + wide / 2, "y": y + high / 2}


@pytest.mark.asyncio
async def test_a_step_sent_again_is_answered_with_the_same_bytes_and_not_executed(server):
    url = server.url(3)
    await begin(url, "a")
    tap = open_first_app(TASK)
    _, first = await post(url, "step", episode="a", index=0, action=tap)
    _, second = await post(url, "step", episode="a", index=1, action=HOME)
    assert first != second
    for index, wanted in ((0, first), (1, second), (0, first)):
        assert await post(url, "step", episode="a", index=index, action=HOME) == (200, wanted)


@pytest.mark.asyncio
async def test_a_reset_sent_again_does_not_undo_what_was_done(server):
    url = server.url(3)
    first = await begin(url, "b")
    _, step = await post(url, "step", episode="b", index=0, action=open_first_app(TASK))
    assert await begin(url, "b") == first
    assert await post(url, "step", episode="b", index=0, action=HOME) == (200, step)
    other = TASK.model_copy(update={"seed": TASK.seed + 1})
    status, body = await post(url, "reset", episode="b", task=other.model_dump())
    assert status == 409 and b"needs a new episode id" in body


@pytest.mark.asyncio
async def test_slots_are_independent(server):
    await begin(server.url(3), "c")
    await begin(server.url(4), "d")
    tap = open_first_app(TASK)
    _, body = await post(server.url(3), "step", episode="c", index=0, action=tap)
    assert decode_step(body)[0].observation.app != "home"
    _, body = await post(server.url(4), "step", episode="d", index=0, action=HOME)
    assert decode_step(body)[0].observation.app == "home"


REFUSED = [
    ("step", {"episode": "other", "index": 0, "action": HOME}, 409, "doesn't hold this slot"),
    ("step", {"episode": "e", "index": 7, "action": HOME}, 409, "is from the future; the next one is"),
    ("step", {"episode": "e", "index": 0, "action": {"type": "tap", "x": 2, "y": 0}}, 400, "action.tap.x"),
    ("step", {"episode": "e", "index": 0, "action": {"type": "push"}}, 400, "push"),
    ("step", {"episode": "e", "index": 0, "action": HOME, "extra": 1}, 400, "extra"),
    ("reset", {"episode": "f", "task": {**TASK.model_dump(), "suite": "quickstrat"}}, 404, "did you mean 'quickstart'"),
    ("reset", {"episode": "f", "task": {**TASK.model_dump(), "template": "opn"}}, 404, "did you mean 'open'"),
    ("reset", {"episode": "f", "task": {**TASK.model_dump(), "params": {"app": "x"}}}, 404, "no parameters"),
    ("evaluate", {"episode": "other"}, 409, "doesn't hold this slot"),
    ("nothing", {}, 404, "/nothing"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("call, body, status, words", REFUSED)
async def test_refusals_name_the_value(server, call, body, status, words):
    url = server.url(5)
    await begin(url, "e")
    got, answer = await post(url, call, **body)
    assert got == status
    assert words in json.loads(answer)["error"]
    assert (await post(url, "step", episode="e", index=0, action=HOME))[0] == 200  # the episode goes on


@pytest.mark.asyncio
async def test_an_unknown_slot_is_named(server):
    status, answer = await post(server.url(99), "evaluate", episode="e")
    assert status == 404 and "slots 0 to 7" in json.loads(answer)["error"]


@pytest.mark.asyncio
async def test_tasks_come_from_the_catalog(server):
    async with aiohttp.ClientSession() as session:

        async def get(query: str) -> tuple[int, dict]:
            async with session.get(f"{server.url(0)}/tasks{query}") as answer:
                return answer.status, await answer.json()

        _, body = await get("?suite=quickstart&split=test&limit=5")
        wanted = catalog.tasks("quickstart", "test")
        assert [Task(**t) for t in body["tasks"]] == [wanted.sample(0, index) for index in range(5)]
        assert (await get("?split=tset"))[0] == 404
        assert (await get("?limit=none"))[0] == 400
        assert (await get("?limit=0"))[0] == 400


@pytest.mark.asyncio
async def test_a_lost_task_shows_another_instance_and_then_nobody(server):
    url = server.url(6)
    _, instance = decode_step(await begin(url, "g"))
    await set_faults(url, {"kind": "lost_task", "atStep": 1})
    await post(url, "step", episode="g", index=0, action=HOME)
    status, body = await post(url, "step", episode="g", index=1, action=HOME)
    assert status == 200 and decode_step(body)[1] != instance
    assert (await post(url, "step", episode="g", index=2, action=HOME))[0] == 409
    await set_faults(url)


@pytest.mark.asyncio
async def test_faults_that_are_none_are_refused(server):
    body = '[{"kind": "hungry"}]'
    async with aiohttp.ClientSession() as session, session.post(f"{server.url(6)}/faults", data=body) as answer:
        assert answer.status == 400 and "hung" in (await answer.json())["error"]


@pytest.mark.asyncio
async def test_a_slow_step_that_is_sent_again_waits_only_for_the_rest(server):
    """The answer is ready at one moment; whoever asks in between gets it then."""
    url = server.url(6)
    await begin(url, "h")
    await set_faults(url, {"kind": "slow", "medianSeconds": 0.3})
    order: list[str] = []

    async def send(name: str, after: float) -> bytes:
        await asyncio.sleep(after)
        _, body = await post(url, "step", episode="h", index=0, action=HOME)
        order.append(name)
        return body

    first, again = await asyncio.gather(send("first", 0), send("again", 0.15))
    await set_faults(url)
    assert first == again


def test_the_same_episode_breaks_at_the_same_place():
    fault = Fault(kind="error", probability=0.2, seed=5)
    hits = [fault.hits("step", "x", index) for index in range(2000)]
    assert hits == [fault.hits("step", "x", index) for index in range(2000)]
    assert hits != [fault.hits("step", "y", index) for index in range(2000)]
    assert 300 < sum(hits) < 500


def test_latency_is_log_normal_around_its_median():
    faults = FAULTS.validate_python([{"kind": "slow", "medianSeconds": 0.2, "sigma": 1.0, "seed": 1}])
    seconds = sorted(latency(faults, "step", "x", index) for index in range(2001))
    assert seconds[1000] == pytest.approx(0.2, rel=0.15)
    assert seconds[1682] / seconds[1000] == pytest.approx(2.718, rel=0.2)  # one sigma up
    assert latency(faults, "step", "x", 7) == latency(faults, "step", "x", 7)


def test_a_fault_has_one_trigger():
    with pytest.raises(ValueError, match="not both"):
        Fault(kind="error", at_step=1, probability=0.5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly_even_with_a_call_hanging(start_server, number):
    running = start_server("--faults", '[{"kind": "hung", "calls": ["reset"]}]')

    async def health() -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{running.url(0)}/health") as answer:
            return answer.status

    async def hang() -> int:
        call = asyncio.create_task(post(running.url(0), "reset", episode="a", task=TASK.model_dump()))
        async with asyncio.timeout(100):
            while await health() != 503:
                pass  # it says so as soon as the call hangs
        assert not call.done()
        running.process.send_signal(number)
        try:
            return (await call)[0]
        except aiohttp.ClientError:
            return 0

    assert asyncio.run(hang()) in (0, 503)
    _, errors = running.process.communicate(timeout=60)
    assert running.process.returncode == 0
    assert errors == ""


BAD_OPTIONS = [
    (["--suites", "quickstrat"], "did you mean 'quickstart'"),
    (["--faults", "[{]"], "--faults is not a list of faults"),
    (["--width", "7"], "must be 32 to 4096"),
    (["--slots", "0"], "must be 1 to 4096"),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS)
def test_bad_options_end_with_words_and_exit_code_2(options, words, capsys):
    try:
        code = main(options)
    except SystemExit as end:  # argparse's own way
        code = end.code
    assert code == 2 and words in capsys.readouterr().err


def test_a_port_in_use_is_a_message_and_exit_code_2(server):
    command = [sys.executable, "-m", "tapforge_envs.phone.server", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"port {server.port} on 127.0.0.1 is in use" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_everywhere_is_ipv4_and_ipv6_on_one_port(start_server, host):
    running = start_server("--host", "::")
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        return  # the machine has none, and the phone serves nevertheless
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{running.port}/health") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("protocol, call", [("tapforge", "reset"), ("mobileworld", "step")])
async def test_a_page_in_a_browser_drives_no_phone(start_server, protocol, call):
    """A site's page can send such a request to this machine without asking anybody."""
    url = f"{start_server('--protocol', protocol).url()}/{call}"
    headers = {"Origin": "https://site.example", "Content-Type": "text/plain"}
    async with aiohttp.ClientSession() as session, session.post(url, data="{}", headers=headers) as answer:
        assert answer.status == 403 and "drives no phone" in await answer.text()


@pytest.mark.parametrize("protocol, path", [("tapforge", "health"), ("mobileworld", "init?device=x")])
async def test_nor_does_a_picture_or_a_link_of_a_page(start_server, protocol, path):
    """They are GETs, which have no Origin; a MobileWorld server registers a device by one."""
    url = f"{start_server('--protocol', protocol).url()}/{path}"
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == 403 and "drives no phone" in await answer.text()
