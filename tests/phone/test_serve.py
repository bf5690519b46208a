"""Phones at several ports and on a page: one phone whatever it is spoken to in; the page acts for itself alone."""

import asyncio
import json
import os
import random
import shlex
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from chromium import tab
from real_adb import RealAdb

from tapforge_envs.people.page import Page
from tapforge_envs.phone import catalog
from tapforge_envs.phone.demonstrator import demonstration
from tapforge_envs.phone.screen import center
from tapforge_envs.phone.serve import CannotServe, Ports, Served, serving
from tapforge_envs.phone.tasks import Template
from tapforge_envs.protocol import ACTION, Answer, Task, Terminate

SUITES = ("standard", "quickstart")
DEADLINE = aiohttp.ClientTimeout(total=60)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(2, 540, 1200, SUITES, Ports()) as running:
        yield running


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=DEADLINE) as opened:
        yield opened


async def get(session: aiohttp.ClientSession, served: Served, path: str, **headers: str) -> tuple[int, dict]:
    async with session.get(f"{served.page}{path}", headers=headers) as answer:
        return answer.status, await answer.json()


async def post(
    session: aiohttp.ClientSession, served: Served, path: str, body: object, **headers: str
) -> tuple[int, dict]:
    async with session.post(f"{served.page}{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_one_phone_whatever_it_is_spoken_to_in(served, session, tmp_path):
    """What one protocol does, the others see: the page, tapforge's, MobileWorld's and the real adb."""
    _, fresh = await get(session, served, "api/phones/1")
    phone = served.phones[1]
    task = catalog.tasks("quickstart", "train").sample(0, 0)
    async with session.post(f"{phone['tapforge']}/reset", json={"episode": "e", "task": task.model_dump()}) as answer:
        assert answer.status == 200
    _, seen = await get(session, served, "api/phones/1")
    assert seen["task"]["goal"] == task.goal and seen["frame"] != fresh["frame"]
    assert (await get(session, served, "api/phones/0"))[1]["task"] is None

    async with session.get(f"{phone['mobileworld']}/task/list") as answer:
        name = (await answer.json())[0]["name"]
    device = {"task_name": name, "req_device": "emulator-5554"}
    async with session.post(f"{phone['mobileworld']}/task/init", json=device) as answer:
        assert answer.status == 200, await answer.text()
    _, again = await get(session, served, "api/phones/1")
    assert again["task"]["suite"] == "standard" and again["frame"] != seen["frame"]
    # The episode of the one who had it before is over, and said to be.
    body = {"episode": "e", "index": 0, "action": {"type": "home"}}
    async with session.post(f"{phone['tapforge']}/step", json=body) as answer:
        assert answer.status == 409

    adb = RealAdb(tmp_path)
    adb.start()
    try:
        device = await adb.connect(int(phone["adb"].rpartition(":")[2]))
        await device.shell("am start -n dev.tapforge.mail/.MainActivity")
        _, after = await get(session, served, "api/phones/1")
        assert after["app"] == "mail"
        shot = (await device("exec-out", "screencap -p")).out
        async with session.get(f"{served.page}api/phones/1/frame") as answer:
            assert await answer.read() == shot
        assert await device.shell("getprop tapforge.goal") == again["task"]["goal"]
        await device.shell(f"am broadcast -a tapforge.RESET --es task {shlex.quote(task.model_dump_json())}")
        assert (await get(session, served, "api/phones/1"))[1]["task"]["goal"] == task.goal
    finally:
        adb.stop()


async def test_a_task_is_played_on_the_page_and_judged(served, session):
    for template in ("turn_switch", "delete_missing_contact", "ask_number"):
        _, state = await post(
            session, served, "api/phones/0/task", {"suite": "standard", "template": template, "number": 1}
        )
        task = catalog.tasks("standard", "train", [template]).sample(0, 1)
        assert state["task"] == {
            "suite": "standard", "template": template, "goal": task.goal, "max_steps": task.max_steps
        } and state["verdict"] is None  # fmt: skip
        assert (await post(session, served, "api/phones/0/finish", {}))[0] == 400
        steps = 0
        for action in played(task):
            if isinstance(action, Terminate):
                status, state = await post(session, served, "api/phones/0/finish", {"status": action.status})
            elif isinstance(action, Answer):
                status, state = await post(session, served, "api/phones/0/finish", {"answer": action.text})
            else:
                body = {"action": ACTION.dump_python(action)}
                status, state = await post(session, served, "api/phones/0/act", body)
                steps += 1
                assert state["steps"] == steps
            assert status == 200, state
        assert state["verdict"]["outcome"] == "success", state
        assert state["verdict"]["feasible"] is (template != "delete_missing_contact")
        status, said = await post(session, served, "api/phones/0/act", {"action": {"type": "home"}})
        assert status == 409 and "start one" in said["error"]
        assert (await post(session, served, "api/phones/0/finish", {"status": "success"}))[0] == 409
    body = {"suite": "quickstart", "template": "open", "split": "test", "number": 3}
    assert (await post(session, served, "api/phones/0/task", body))[0] == 200
    _, state = await post(session, served, "api/phones/0/finish", {"status": "success"})
    assert state["verdict"]["outcome"] == "failure" and state["verdict"]["score"] == 0.0


def played(task: Task) -> list:
    phone = catalog.phone_for(task.suite, 540, 1200)
    phone.begin(task.seed, catalog.rules_of(task))
    template: Template = catalog.template_of(task)
    done = []
    for action in demonstration(phone, template, task.params):
        phone.act(action)
        done.append(action)
    return done


async def test_a_state_is_answered_when_it_changes(served, session):
    _, state = await get(session, served, "api/phones/0")
    waiting = asyncio.ensure_future(get(session, served, f"api/phones/0?seen={state['seen']}"))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await post(session, served, "api/phones/0/act", {"action": {"type": "open_app", "name": "mail"}})
    _, after = await waiting
    assert after["seen"] != state["seen"] and after["app"] == "mail" and after["steps"] == 1


@pytest.mark.parametrize(
    "headers, words",
    [
        ({"Host": "evil.example"}, "isn't called 'evil.example'"),
        ({"Host": "127.0.0.1.evil.example:80"}, "isn't called"),
        ({"Host": "[::"}, "isn't called"),
        ({"Origin": "http://evil.example"}, "a page of 'http://evil.example' asks"),
        ({"Origin": "null"}, "a page of 'null' asks"),
        ({"Origin": "http://127.0.0.1:1"}, "asks; only the phones' own page may"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site asks"),
        ({"Sec-Fetch-Site": "same-site"}, "another site asks"),
    ],
)
async def test_other_sites_are_refused(served, session, headers, words):
    for status, said in (
        await get(session, served, "api/phones/0", **headers),
        await post(session, served, "api/phones/0/act", {"action": {"type": "home"}}, **headers),
        await post(session, served, "api/phones/0/task", {"suite": "quickstart", "template": "open"}, **headers),
    ):
        assert status == 403 and words in said["error"], said
    _, state = await get(session, served, "api/phones/0")
    assert state["steps"] == 0 and state["task"] is None


async def test_the_page_is_whole_and_its_own(served, session):
    async with session.get(served.page, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
        html, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.status == 200
    assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy and "unsafe" not in policy
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert html.count(f'nonce="{nonce}"') == 2 and "{{" not in html
    assert "://" not in html, "it loads nothing from elsewhere"
    own = f"http://{served.page.split('/')[2]}"
    status, _ = await post(session, served, "api/phones/0/act", {"action": {"type": "home"}}, Origin=own)
    assert status == 200
    forwarded = {"Host": "localhost:9999", "Origin": "http://localhost:9999"}
    assert (await get(session, served, "api/phones/0", **forwarded))[0] == 200


@pytest.mark.parametrize(
    "path, body, status, words",
    [
        ("act", {"action": {"type": "fly"}}, 400, "action"),
        ("act", {"action": {"type": "tap", "x": 2, "y": 0}}, 400, "less than or equal to 1"),
        ("act", [1], 400, "body"),
        ("act", {}, 400, "action: Field required"),
        ("task", {"suite": "standrd", "template": "x"}, 404, "did you mean 'standard'"),
        ("task", {"suite": "standard", "template": "turn_swich"}, 404, "did you mean 'turn_switch'"),
        ("task", {"suite": "standard", "template": "turn_switch", "number": -1}, 400, "number"),
        ("task", {"suite": "standard", "template": "turn_switch", "split": "x"}, 400, "split"),
        ("finish", {"status": "success"}, 409, "no task is running"),
        ("finish", {"status": "great"}, 400, "status"),
        ("act", {"action": {"type": "type", "text": "x" * 200_000}}, 413, "Request Entity Too Large"),
    ],
)
async def test_what_cannot_be_read_is_said(served, session, path, body, status, words):
    got, said = await post(session, served, f"api/phones/0/{path}", body)
    assert got == status and words in said["error"], said


async def test_what_is_not_there_and_what_is_no_json(served, session):
    for number in ("2", "-1", "x", "9" * 30):
        status, said = await get(session, served, f"api/phones/{number}")
        assert status == 404 and "there are 0 to 1" in said["error"]
    assert (await get(session, served, "api/nothing"))[0] == 404
    url = f"{served.page}api/phones/0/act"
    async with session.post(url, data='{"action": {"type": "home"}}', headers={"Content-Type": "text/plain"}) as answer:
        assert answer.status == 415
    async with session.post(url, data="{", headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400


@pytest.mark.parametrize(
    "ports, host, words",
    [
        (Ports(None, None, None, 5555), "127.0.0.1", "phone 0 would be at port 5555"),
        (Ports(None, None, None, 5554), "127.0.0.1", "phone 1 would be at port 5555.*--adb 5586 is free"),
        (Ports(0, None, None, None), "0.0.0.0", "others reach the page.*TAPFORGE_TOKEN"),
        (Ports(None, 0, None, None), "192.0.2.1", "tapforge: can't listen on 192.0.2.1:0"),
    ],
)
async def test_what_cannot_be_served_is_said(ports, host, words):
    with pytest.raises(CannotServe, match=words):
        async with serving(2, 96, 160, SUITES, ports, host):
            pass


#: hosts to listen at, and the names by which this machine reaches them; the first one is printed
REACHED = [("0.0.0.0", ["127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"])]
if socket.has_dualstack_ipv6():
    REACHED += [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"]), ("*", ["[::1]", "127.0.0.1"])]


@pytest.mark.parametrize(("host", "names"), REACHED)
async def test_every_address_that_is_printed_is_reached_and_names_this_machine(host, names, session):
    async with serving(1, 96, 160, SUITES, Ports(), host, token="0123456789abcdef") as here:
        (phone,) = here.phones
        servers = {here.page: "api/catalog", phone["tapforge"]: "/health", phone["mobileworld"]: "/health"}
        for url, path in servers.items():
            assert url.startswith(f"http://{names[0]}:")
            for name in names:
                at = url.replace(names[0], name, 1) + path
                async with session.get(at, headers={"Authorization": "Bearer 0123456789abcdef"}) as answer:
                    assert answer.status == 200, at
        assert phone["adb"].startswith(f"adb connect {names[0]}:")
        for name in names:
            port = int(phone["adb"].rpartition(":")[2])
            _, writer = await asyncio.open_connection(name.strip("[]"), port)
            writer.close()


async def test_a_taken_port_serves_nothing_at_all():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as free:
            first = free.getsockname()[1]
        with pytest.raises(CannotServe, match=f"page: port {taken} on 127.0.0.1 is in use; --page 0 takes a free one"):
            async with serving(1, 96, 160, SUITES, Ports(taken, first, None, 0)):
                pass
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection(("127.0.0.1", first), 1)


async def test_the_command_serves_until_it_is_stopped():
    command = ["-m", "tapforge_trainer.cli.main", "phone", "serve", "--json", "--width", "96", "--height", "160"]
    script = "import sys; from tapforge_trainer.cli.main import main; main()"
    words = [sys.executable, "-c", script, *command[2:]]

    async def run(*more: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(*words, *more, stdout=-1, stderr=-1)

    process = await run("--page", "0", "--tapforge", "0", "--mobileworld", "off", "--adb", "0", "--phones", "3")
    said = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert len(said["phones"]) == 3 and set(said["phones"][0]) == {"tapforge", "adb"}
    async with aiohttp.ClientSession(timeout=DEADLINE) as session, session.get(f"{said['page']}api/phones/2") as answer:
        assert (await answer.json())["width"] == 96
    process.send_signal(signal.SIGTERM)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err) == (0, b"")
    for more, message in (
        (("--adb", "5555"), b"adb servers take whatever answers"),
        (("--page", "99999"), b"is not a port"),
        (("--suite", "standrd"), b"did you mean 'standard'"),
        (("--host", "0.0.0.0", "--tapforge", "off", "--mobileworld", "off", "--adb", "off"), b"others reach the page"),
    ):
        process = await run("--page", "0", "--tapforge", "0", "--mobileworld", "0", *more)
        _, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2 and message in err and b"Traceback" not in err, err


async def test_a_person_plays_a_task_in_the_browser(tmp_path, monkeypatch):
    """Chromium shows the page; clicks, a drag, keys and typed text reach the phone, and the score comes back."""
    slots = []
    monkeypatch.setattr(Page, "__init__", remembering(Page.__init__, slots))
    async with serving(2, 540, 1200, SUITES, Ports()) as served, tab(served.page, tmp_path / "profile") as page:
        phone = lambda: slots[0].phone  # noqa: E731

        async def tap(id: str) -> None:
            widget = phone().screen().find(id)
            assert widget is not None, (id, [w.id for w in phone().screen().widgets])
            steps = await page.value("state.steps")
            await page.click("#screen", *center(widget.box))
            await page.until(f"state.steps === {steps + 1}")

        await page.until("document.querySelector('#screen').naturalWidth === 540")
        assert await page.value("getComputedStyle(document.querySelector('#which')).display") != "none"
        await page.value("document.querySelector('#template').value = 'turn_switch'")
        await page.click("#start")
        await page.until("state && state.task !== null")
        task = slots[0].task
        assert await page.value("document.querySelector('#goal').textContent") == task.goal
        # A stroke over the launcher goes to its second page.
        await page.stroke("#screen", (0.8, 0.5), (0.2, 0.5))
        await page.until("state.steps === 1")
        assert phone().state["nav"]["page"] == "second"
        # Keys and text.
        phone().act(ACTION.validate_python({"type": "open_app", "name": "contacts"}))
        await page.until("state.app === 'contacts'")
        await tap("field:search")
        for key in ("A", "n", "x"):
            await page.key(key)
        await page.key("Backspace")
        await page.until("state.steps === 6")
        assert phone().screen().find("field:search").text == "An"
        await page.click("#text")
        await page.call("Input.insertText", text="你好 🎉")
        await page.click("#type")
        await page.until("state.steps === 7")
        assert phone().screen().find("field:search").text == "An你好 🎉"
        await page.screenshot(Path(os.environ.get("TAPFORGE_SHOTS", tmp_path)) / "typing.png")
        # The task itself, as its plan has it.
        await page.click("#start")
        await page.until("state.steps === 0")
        for action in played(task):
            if action.type == "tap":
                await page.click("#screen", action.x, action.y)
            elif not isinstance(action, Terminate):
                slots[0].phone.act(action)
            await page.value("queue")
        await page.click("#done")
        await page.until("document.querySelector('#verdict').className === 'success'")
        assert "success, score 1" in await page.value("document.querySelector('#outcome').textContent")
        await page.screenshot(Path(os.environ.get("TAPFORGE_SHOTS", tmp_path)) / "verdict.png")
        # The other phone has no task.
        await page.value("document.querySelector('#number').value = '1'")
        await page.value("document.querySelector('#number').dispatchEvent(new Event('change'))")
        await page.until("state && state.task === null")
        assert page.complaints == []


def remembering(begin, slots):
    def remember(self, phones, *rest):
        slots.extend(shown.slot for shown in phones)
        begin(self, phones, *rest)

    return remember


async def test_no_body_breaks_the_page(served, session):
    """1,500 bodies of any shape to the calls that act: each is done or refused in words, and the page goes on."""
    rng = random.Random(3)
    good = [
        ("act", {"action": {"type": "tap", "x": 0.5, "y": 0.5}}),
        ("act", {"action": {"type": "swipe", "x": 0.5, "y": 0.9, "x2": 0.5, "y2": 0.1}}),
        ("act", {"action": {"type": "type", "text": "a"}}),
        ("task", {"suite": "quickstart", "template": "open", "split": "train", "number": 1}),
        ("finish", {"status": "success"}),
        ("finish", {"answer": "a"}),
    ]
    odd = [None, True, -1, 1e308, 2**70, "", "x" * 300, "\ud800", [], {}, [[[]]], {"type": "tap"}, "home", 0.5]
    statuses = Counter[int]()
    for _ in range(1500):
        call, body = json.loads(json.dumps(rng.choice(good)))
        for _ in range(rng.randrange(3)):
            part = body["action"] if isinstance(body.get("action"), dict) and rng.random() < 0.7 else body
            part[rng.choice([*part, "type", "extra"])] = rng.choice(odd)
        data = json.dumps(body).encode()
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))] + rng.randbytes(rng.randrange(4))
        url = f"{served.page}api/phones/{rng.randrange(2)}/{call if rng.random() < 0.9 else 'act'}"
        async with session.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
            said = await answer.json()
            statuses[answer.status] += 1
            assert ("error" in said) == (answer.status != 200)
    assert set(statuses) <= {200, 400, 404, 409} and statuses[200] > 50, statuses
    for number in range(2):
        assert (await get(session, served, f"api/phones/{number}"))[0] == 200
