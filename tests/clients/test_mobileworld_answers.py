"""A MobileWorld server that answers with anything: a named fault, or right after all; nothing is asked twice."""

import io
import json
import random

import pytest
from aiohttp import web
from hostile import JUNK, cut_off, endless, mangled, redirect, says
from mobileworld_house import NAMES, TAP, TASK, a_house
from PIL import Image

from tapforge_envs import protocol as p
from tapforge_envs.protocol import EnvironmentFault


@pytest.mark.parametrize("score", ["NaN", "-0.1", "1.01", "9" * 400, "1e999", "null", '"1"', "[1]"])
async def test_a_score_that_is_none_is_a_fault(score):
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        house.rough.plan["/task/eval"] = [says(f'{{"score": {score}}}')]
        with pytest.raises(EnvironmentFault, match="phone-0: evaluate: .*'score' must be a number from 0 to 1"):
            await client.evaluate()


@pytest.mark.parametrize(("score", "value"), [("true", 1.0), ("0", 0.0), ("0.5", 0.5)])
async def test_what_graders_answer_is_a_score(score, value):
    async with a_house() as house:
        client = house.client()
        await client.reset(TASK)
        house.rough.plan["/task/eval"] = [says(f'{{"score": {score}, "reason": "because"}}')]
        assert await client.evaluate() == p.Score(value, "because")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/task/init", '"Failed"', "'quickstart-train-1' answered 'Failed', expected 'OK'"),
        ("/task/init", '{"detail": "no"}', "expected 'OK'"),
        ("/step", '{"detail": "Device is not healthy"}', "Device is not healthy"),
        ("/step", '{"error": "x"}', "error"),
        ("/step", '{"device": "a"}', "expected 'result'"),
        ("/step", '{"result": "adb: device offline"}', "adb failed: adb: device offline"),
        ("/step", '{"result": "error: no devices/emulators found"}', "adb failed"),
        ("/init", '{"device": "emulator-5554", "viewport_size": [0, 10]}', "must be .width, height. in pixels"),
        ("/init", '{"device": "emulator-5554", "viewport_size": [true, 10]}', "must be .width, height. in pixels"),
        ("/init", '{"device": "", "viewport_size": [1, 1]}', "expected the serial of a device"),
        ("/health", '{"ok": true}', "expected 'ok' and 'device_status'"),
        ("/health", "[]", "expected 'ok' and 'device_status'"),
        ("/task/goal", '""', "expected the goal's words"),
    ],
)
async def test_an_error_inside_a_200_is_a_fault(path, body, words):
    async with a_house() as house:
        house.rough.plan[path] = [says(body)]
        client = house.client()
        with pytest.raises(EnvironmentFault, match=words):
            await client.health()
            await client.reset(TASK)
            await client.step(TAP, 0)


@pytest.mark.parametrize(
    "task",
    [
        TASK.model_copy(update={"suite": "quickstart"}),
        TASK.model_copy(update={"params": {"a": "b"}}),
        TASK.model_copy(update={"template": "Nonesuch"}),
        TASK.model_copy(update={"template": "Nonesuch", "goal": "Do."}),
    ],
)
async def test_a_task_that_the_server_does_not_have(task):
    async with a_house() as house:
        with pytest.raises(EnvironmentFault, match="not a MobileWorld task|task/goal: answered 500|not found"):
            await house.client().reset(task)
        await house.client().close()
        assert not house.sent("/task/tear_down")


async def test_the_servers_tasks():
    async with a_house() as house:
        client = house.client()
        assert await client.tasks(100) == list(NAMES.all)
        for body, words in (
            (json.dumps([{"name": f"T{i}"} for i in range(100_000)]), "answered 100000 tasks, expected a list of 1 to"),
            ("[]", "answered 0 tasks"),
            ('{"a": 1}', "expected a list"),
            ('[{"name": 3}]', "has no name"),
            ('["Task"]', "has no name"),
        ):
            house.rough.plan["/task/list"] = [says(body)]
            with pytest.raises(EnvironmentFault, match=words):
                await client.tasks(100)


@pytest.mark.parametrize("path", ["/health", "/init", "/task/goal", "/task/init", "/screenshot", "/step", "/task/eval"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (endless, "longer than"),
        (says(b" " * 4, 200, **{"Content-Length": str(2 << 30)}), "answer of 2147483648 bytes is longer than"),
        (cut_off, "connection broke"),
        (redirect("http://127.0.0.1:1/"), "answered 307"),
        (says("Internal Server Error", 500), "answered 500"),
        (says("[" * 100_000), "not JSON|expected the picture"),
    ],
    ids=["endless", "2 GiB", "cut off", "redirect", "500", "deep"],
)
async def test_what_is_no_answer_is_a_fault(path, answer, words):
    async with a_house() as house:
        house.rough.plan[path] = [answer]
        client = house.client()
        with pytest.raises(EnvironmentFault, match=words) as caught:
            await client.health()
            await client.reset(TASK)
            await client.step(TAP, 0)
            await client.evaluate()
        assert len(str(caught.value)) < 1000
        assert sum(line.split(" ")[1].split("?")[0] == path for line in house.rough.seen) == 1


async def fuzzed(seed: int, count: int) -> int:
    """Episodes in which every answer may be wrong; returns how many wrong answers were sent."""
    rng, wrong = random.Random(seed), 0

    def mangle(path: str, body: bytes):
        nonlocal wrong
        if rng.random() < 0.75:
            return None
        wrong += 1
        status = rng.choice((200,) * 12 + (201, 204, 404, 422, 500, 503))
        spoilt = b"" if status == 204 else mangled(rng, body)
        return web.Response(body=spoilt, status=status, headers={"Content-Type": "application/json"})

    async with a_house() as house:
        house.rough.mangle = mangle
        while wrong < count:
            house.rough.seen.clear()
            client = house.client()
            for call, *given in (
                (client.health,),
                (client.reset, TASK),
                (client.step, TAP, 0),
                (client.step, p.Back(), 1),
                (client.evaluate,),
                (client.close,),
            ):
                try:
                    answer = await call(*given)
                except EnvironmentFault as fault:
                    assert str(fault).startswith("phone-0: ") and len(str(fault)) < 1000
                    break
                observation = answer.observation if isinstance(answer, p.StepResult) else answer
                if isinstance(observation, p.Observation):
                    with Image.open(io.BytesIO(observation.frame.data)) as image:
                        assert image.size == (observation.frame.width, observation.frame.height)
                if isinstance(answer, p.Score):
                    assert 0 <= answer.value <= 1
            # whatever came back, nothing was asked twice
            assert house.sent("/step") <= 2 and house.sent("/task/init") <= 1
    return wrong


async def test_wrong_answers_are_named_faults_or_right_after_all():
    assert await fuzzed(seed=1, count=1500) >= 1500


async def test_every_kind_of_junk_in_every_field():
    async with a_house() as house:
        for junk in JUNK:
            for path, name in (
                ("/init", "device"),
                ("/step", "nothing"),
                ("/screenshot", "b64_png"),
                ("/task/eval", "x"),
            ):
                house.rough.plan = {path: [says(f'{{"{name}": {junk}}}')]}
                client = house.client()
                with pytest.raises(EnvironmentFault):
                    await client.reset(TASK)
                    await client.step(TAP, 0)
                    await client.evaluate()
