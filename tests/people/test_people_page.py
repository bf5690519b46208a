"""The page without a browser: who may play, when an episode can be kept, and how a phone is given back."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path

import aiohttp
import pytest
from people_house import demonstrated, pages

from tapforge_envs.people.episode import CannotKeep, HumanAttempt, HumanEpisode, HumanStep, typed_together
from tapforge_envs.phone import catalog
from tapforge_envs.phone.serve import Ports, serving
from tapforge_envs.protocol import (
    Frame,
    Home,
    Hotkey,
    Observation,
    Outcome,
    Reason,
    Score,
    Swipe,
    Task,
    Terminate,
    Type,
)
from tapforge_trainer.data.episodes import DataError
from tapforge_trainer.data.folder import DataFolder
from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.people import PeopleFolder

TASKS = [catalog.tasks("quickstart", "train", ["open"]).sample(0, number) for number in range(2)]
DONE = {"status": "success"}


async def test_two_pages_at_once_and_one_takes_over(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        assert (await served.start())[0] == 200
        for name, body in (("/act", {"action": {"type": "home"}}), ("/finish", DONE), ("/keep", {}), ("/discard", {})):
            status, said = await served.call(name, body, "two")
            assert (status, said["reason"]) == (409, "held"), name
        status, said = await served.start(1, "two")
        assert status == 409 and "another page plays" in said["error"]
        assert (await served.call("", page="two"))[1]["held"] and not (await served.call(""))[1]["held"]
        status, state = await served.call("/take", {}, "two")
        assert status == 200 and state["task"]["goal"] == TASKS[0].goal and not state["held"]
        assert (await served.act(Home()))[0] == 409
        assert (await served.act(Home(), "two"))[0] == 200
        assert (await served.start(1, "one", take=True))[1]["task"]["goal"] == TASKS[1].goal


async def test_no_other_page_interferes_while_a_phone_is_prepared(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        slot, begun, go = served.slots[0], asyncio.Event(), asyncio.Event()
        reset = slot.reset

        async def slow(episode: str, task: Task) -> bytes:
            begun.set()
            await go.wait()
            return await reset(episode, task)

        slot.reset = slow
        starting = asyncio.create_task(served.start())
        await asyncio.wait_for(begun.wait(), 30)
        for name, body in (("/discard", {}), ("/task", {"key": TASKS[1].key}), ("/act", {"action": {"type": "home"}})):
            status, said = await served.call(name, body, "two")
            assert (status, said.get("reason")) == (409, "held"), name
        status, said = await served.start(1, "two", take=True)
        assert status == 409 and "busy (preparing the phone)" in said["error"]
        go.set()
        assert (await starting)[0] == 200 and (await served.act(Home()))[0] == 200
        # A start that fails leaves the phone free.
        assert (await served.call("/discard", {}))[0] == 200
        assert (await served.call("/task", {"key": "nosuch"}))[0] == 404
        assert not (await served.call("", page="two"))[1]["held"]


async def test_what_comes_after_the_end_is_refused_and_half_an_episode_is_not_kept(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        status, said = await served.act(Home())
        assert status == 409 and "start one" in said["error"]
        assert (await served.call("/keep", {}))[0] == 409
        await served.start()
        status, said = await served.call("/keep", {})
        assert status == 409 and "isn't over" in said["error"]
        assert not (tmp_path / "people").exists()
        for action in demonstrated(TASKS[0]):
            status, state = await served.act(action)
            assert status == 200
        assert state["verdict"]["outcome"] == "success" and served.behind.slots[0].episode is None
        assert (await served.act(Home()))[0] == 409 and (await served.call("/finish", DONE))[0] == 409
        assert (await served.call("/keep", {"outcome": "failure"}))[0] == 200
        status, said = await served.call("/keep", {})
        assert status == 409 and "kept already" in said["error"]
        [episode] = DataFolder(tmp_path / "people")
        assert episode.outcome == "success", "the verifier's word counts"
        assert len(episode.steps) == len(demonstrated(TASKS[0]))
        # A person may give up, and says so.
        await served.start(1)
        assert (await served.call("/finish", {"status": "infeasible"}))[1]["verdict"]["outcome"] == "failure"
        assert (await served.call("/keep", {}))[0] == 200
        assert [one.outcome for one in DataFolder(tmp_path / "people")] == ["success", "failure"]


async def test_a_closed_browser_gives_the_phone_back(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS, silence=0.2) as served:
        await served.start()
        await served.act(Home())
        assert served.behind.slots[0].episode is not None
        # Another page that only looks on doesn't hold the phone for the one that was closed.
        seen = (await served.call("", page="two"))[1]["seen"]
        looking = asyncio.create_task(served.call(f"?seen={seen}", page="two"))
        async with asyncio.timeout(60):
            while served.behind.slots[0].episode is not None:  # noqa: ASYNC110 (an episode has no callback)
                await asyncio.sleep(0.05)
            while (state := (await served.call("", page="two"))[1])["task"] is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not state["held"] and (await served.start(1, "two"))[0] == 200
        await looking
    assert not (tmp_path / "people").exists()


async def test_a_screen_that_was_turned_is_not_touched(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        await served.start()
        body = {"action": {"type": "tap", "x": 0.1, "y": 0.9}}
        status, said = await served.call("/act", {**body, "screen": [160, 96]})
        assert status == 409 and "is 96x160 pixels now and was 160x96" in said["error"]
        assert (await served.call(""))[1]["steps"] == 0
        assert (await served.call("/act", {**body, "screen": [96, 160]}))[1]["steps"] == 1


async def test_an_action_that_the_phone_lacks_is_a_note_and_a_phone_that_fails_the_end(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        await served.start()
        slot = served.slots[0]
        playing = slot._episode
        step = playing.environment.step

        async def lacking(action, index):
            from tapforge_envs.protocol import UnsupportedAction

            if isinstance(action, Hotkey):
                raise UnsupportedAction("no hotkeys here")
            return await step(action, index)

        playing.environment.step = lacking
        status, said = await served.act(Hotkey(keys=("ctrl", "c")))
        assert status == 422 and "no hotkeys here" in said["error"]
        assert (await served.act(Home()))[0] == 200, "the index of the step is not used up"
        served.behind.slots[0].restart()
        status, said = await served.act(Home())
        assert status >= 500, said
        state = (await served.call(""))[1]
        assert state["keep"]["invalid"].startswith("the phone failed") and not state["keep"]["can"]
        assert (await served.call("/keep", {}))[0] == 409
        assert (await served.call("/discard", {}))[0] == 200 and (await served.start())[0] == 200


async def test_programs_and_people_share_a_phone_by_the_rules_of_the_bridge(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        slot = served.slots[0]
        await slot.reset("theirs", TASKS[1])
        status, said = await served.start()
        assert (status, said["reason"]) == (409, "held") and "a program plays episode 'theirs'" in said["error"]
        assert (await served.start(take=True))[0] == 200
        # A program's reset ends the person's episode.
        await slot.reset("again", TASKS[1])
        status, said = await served.act(Home())
        assert status == 409 and "doesn't hold this phone" in said["error"]
        assert (await served.call("/discard", {}))[0] == 200 and slot.episode == "again"


async def test_where_nothing_judges_the_person_decides(tmp_path: Path) -> None:
    goal = "打开设置 — and <i>look</i>"
    async with pages(tmp_path / "people", TASKS) as served:
        status, said = await served.call("/task", {"goal": goal})
        assert status == 400 and "its own tasks alone" in said["error"]
    async with pages(tmp_path / "people", TASKS, own_goals=True) as served:
        # The simulated phone has no such task, which here stands for a phone without a verifier.
        known, slot = catalog.tasks("quickstart", "train").sample(0, 0), served.slots[0]
        reset = slot.reset
        slot.reset = lambda episode, task: reset(episode, known)

        async def evaluate(episode: str) -> Score:
            from tapforge_envs.serving.claims import Refused

            raise Refused(502, "nothing judges it", Reason.JUDGE_ERROR)

        slot.evaluate = evaluate
        for outcome in ("success", "failure"):
            assert (await served.call("/task", {"goal": goal}))[0] == 200
            await served.act(Swipe(x=0.5, y=0.8, x2=0.5, y2=0.2))
            state = (await served.call("/finish", DONE))[1]
            assert state["verdict"]["score"] is None and state["keep"]["decide"], state
            status, said = await served.call("/keep", {})
            assert status == 409 and "say whether it went well" in said["error"]
            assert (await served.call("/keep", {"outcome": outcome}))[0] == 200
    data = DataFolder(tmp_path / "people")
    assert [episode.outcome for episode in data] == ["success", "failure"]
    assert data[0].task.goal == goal and data[0].task.template.startswith("打开设置-and-i-look-i-")
    [one, _] = [group.episodes[0] for group in Recording(tmp_path / "people" / "rollout").groups()]
    assert one.valid and one.verified is None and one.score is None and "the person said so" in one.message


@pytest.mark.parametrize(
    "headers, words",
    [
        ({"Host": "evil.example"}, "isn't called 'evil.example'"),
        ({"Origin": "http://evil.example"}, "a page of 'http://evil.example' asks"),
        ({"Sec-Fetch-Site": "cross-site"}, "another site asks"),
    ],
)
async def test_other_sites_are_refused(tmp_path: Path, headers: dict[str, str], words: str) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        for name, body in (("", None), ("/task", {"key": TASKS[0].key}), ("/keep", {}), ("/take", {})):
            status, said = await served.call(name, body, **headers)
            assert status == 403 and words in said["error"], said
        assert served.behind.slots[0].episode is None


async def test_a_proxy_that_speaks_tls_may_stand_before_the_page(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS) as served:
        headers = {"Host": "127.0.0.1", "Origin": "https://127.0.0.1", "Sec-Fetch-Site": "same-origin"}
        assert (await served.call("/task", {"key": TASKS[0].key}, **headers))[0] == 200


async def test_a_token_is_brought_as_a_cookie(tmp_path: Path) -> None:
    async with pages(tmp_path / "people", TASKS, token="0123456789abcdef") as served:
        assert (await served.call(""))[0] == 401
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
            async with browser.get(f"{served.address}?token=0123456789abcdeg") as answer:
                assert answer.status == 401
            async with browser.get(f"{served.address}api/catalog") as answer:
                assert answer.status == 401
            async with browser.get(f"{served.address}?token=0123456789abcdef") as answer:
                assert answer.status == 200 and "token" not in str(answer.url)
            async with browser.get(f"{served.address}api/catalog") as answer:
                assert (await answer.json())["keeps"]


async def test_on_the_simulated_phone_too(tmp_path: Path) -> None:
    """The page of `tapforge phone serve`: what it has played alone can be kept."""
    writer = PeopleFolder(tmp_path / "people", "tapforge", ["http://127.0.0.1:1"])
    body = {"suite": "quickstart", "template": "open"}
    task = catalog.tasks("quickstart", "train", ["open"]).sample(0, 0)
    async with serving(1, 96, 160, ("quickstart",), Ports(0, 0, None, None), writer=writer) as served:
        page, phone = f"{served.page}api/phones/0", served.phones[0]["tapforge"]
        async with aiohttp.ClientSession() as session:

            async def post(url: str, body: object) -> dict:
                async with session.post(url, json=body) as answer:
                    return await answer.json()

            await post(f"{page}/task", body)
            for action in demonstrated(task):
                state = await post(f"{page}/act", {"action": action.model_dump()})
            assert state["keep"]["can"] and state["verdict"]["outcome"] == "success"
            assert (await post(f"{page}/keep", {}))["keep"]["kept"]
            # Another client in its middle invalidates it; one that starts a task has ended it.
            await post(f"{page}/task", body)
            async with session.post(f"{phone}/reset", json={"episode": "e", "task": task.model_dump()}) as answer:
                assert answer.status == 200
            assert (await post(f"{page}/keep", {}))["error"].startswith("no task was played")
            await post(f"{page}/task", body)
            await post(f"{page}/act", {"action": {"type": "home"}})
    writer.close()
    [episode] = DataFolder(tmp_path / "people")
    assert [step.action for step in episode.steps] == demonstrated(task)


# --- what is written down ---------------------------------------------------------------------------------------------

SCREEN = Observation(Frame.of(b"png", 1, 1))
TASK = Task(suite="s", template="t", goal="g")


def test_texts_that_were_typed_one_after_another_are_one_step() -> None:
    actions = [Type(text="a"), Type(text="b"), Home(), Type(text="你"), Type(text="🎉"), Type(text="c" * 9_999)]
    made = typed_together([HumanStep(SCREEN, action) for action in actions])
    said = [step.action.text if isinstance(step.action, Type) else step.action.type for step in made]
    assert said == ["ab", "home", "你🎉", "c" * 9_999]


def test_more_than_is_held_in_memory_is_not_kept() -> None:
    attempt = HumanAttempt("phone", TASK, last=SCREEN)
    for _ in range(1001):
        attempt.did(HumanStep(SCREEN, Home()), SCREEN)
    attempt.ends(Reason.DONE)
    attempt.judged(Score(1.0))
    with pytest.raises(CannotKeep, match="more than 1,000 steps"):
        attempt.played(None)
    assert not attempt.steps and not attempt.told()["can"]


def played(screen: bytes, text: str = "a") -> HumanEpisode:
    seen = Observation(Frame.of(screen, 1, 1))
    steps = (HumanStep(seen, Type(text=text)), HumanStep(seen, Terminate(status="success")))
    return HumanEpisode("phone", TASK, steps, seen, Reason.DONE, Score(1.0), Outcome.SUCCESS, False, 1.0, 2.0)


async def test_an_interrupted_write_is_cut_off_and_what_was_redacted_stays(tmp_path: Path, png: bytes) -> None:
    folder = tmp_path / "people"
    for _ in range(2):
        writer = PeopleFolder(folder, "adb", ["R58M123ABC"])
        await writer.keep(played(png))
        with pytest.raises(CannotKeep, match="in use by process"):
            await PeopleFolder(folder, "adb", ["R58M123ABC"]).keep(played(png))
        writer.close()
        with (folder / "episodes.jsonl").open("a") as file:
            file.write('{"half an episode')
        with pytest.raises(DataError, match="cut off"):
            DataFolder(folder)
    lines = (folder / "episodes.jsonl").read_text().replace('"g"', '"[redacted]"')
    (folder / "episodes.jsonl").write_text(lines)
    writer = PeopleFolder(folder, "adb", ["R58M123ABC"])
    await writer.keep(played(png))
    writer.close()
    assert [episode.task.goal for episode in DataFolder(folder)] == ["[redacted]", "[redacted]", "g"]
    ids = [episode.id for episode in DataFolder(folder)]
    assert len(set(ids)) == 3 and [g.id for g in Recording(folder / "rollout").groups()] == ids


@pytest.mark.parametrize("full", ["episodes.jsonl", "rollout/rollout-000001.jsonl"])
async def test_an_episode_that_found_no_room_is_kept_later_and_once(tmp_path: Path, png: bytes, full: str) -> None:
    folder = tmp_path / "people"
    writer = PeopleFolder(folder, "adb", ["R58M123ABC"])
    await writer.keep(played(png))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow beyond this one and a bit: it is left with half a line.
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / full).stat().st_size + 10, hard))
    try:
        with pytest.raises(CannotKeep):
            await writer.keep(played(png, "more"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for _ in range(2):
        await writer.keep(played(png, "more"))
    writer.close()
    ids = [episode.id for episode in DataFolder(folder)]
    assert len(set(ids)) == 3 and [group.id for group in Recording(folder / "rollout").groups()] == ids


async def test_what_can_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "spec.yaml").write_text("mine")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.json").write_text(json.dumps({"made_of": {"source": "verl"}}))
    for other in ("run", "set"):
        with pytest.raises(ConfigurationError, match="other files than what people played.*--record"):
            PeopleFolder(tmp_path / other, "adb", ["R58M123ABC"])
    writer = PeopleFolder(tmp_path / "file" / "people", "adb", ["R58M123ABC"])
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotKeep, match="can't be written|Not a directory"):
        await writer.keep(played(b"no picture"))
    writer = PeopleFolder(tmp_path / "people", "adb", ["R58M123ABC"])
    with pytest.raises(CannotKeep, match="image"):
        await writer.keep(played(b"no picture"))
    writer.close()
    assert len(DataFolder(tmp_path / "people")) == 0
