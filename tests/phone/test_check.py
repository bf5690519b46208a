"""The conformance check: silent on the real server, and the right words for every sickness."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from e2e import packages
from phones import PATIENT, impatient, phones, put_forward, until

from tapforge_envs.check import check, run_check
from tapforge_envs.phone import catalog
from tapforge_envs.phone.server import application
from tapforge_envs.phone.slot import Slot
from tapforge_envs.protocol import StepResult
from tapforge_envs.serving.claims import Claims

#: seconds that no healthy phone takes for a call
LATE = PATIENT.step


@pytest.mark.asyncio
async def test_the_real_server_conforms(server):
    assert await check(server.url(0), LATE) == []
    assert await check(f"http://127.0.0.1:{server.port}/", LATE) == []  # the bare root is slot 0


#: fault -> (rule, words) of a violation that must be among those found
SICK = {
    "hung": ([{"kind": "hung", "atStep": 2}], "step", "no answer within 100 s; yet /health says ok"),
    "slow": ([{"kind": "slow", "medianSeconds": 3600}], "reset", "no answer within 100 s"),
    "corrupt": ([{"kind": "corrupt", "atStep": 1}], "frame", "cut off or corrupted"),
    "half": ([{"kind": "half", "atStep": 1}], "frame", "is not a whole picture"),
    "wrong size": ([{"kind": "wrong_size", "atStep": 1}], "frame", "the picture is 48x80 pixels, announced was 96x160"),
    "lying health": ([{"kind": "lying_health"}], "reset", "answers 503 instead of 200"),
    "lying about a hang": ([{"kind": "hung", "atStep": 0}, {"kind": "lying_health"}], "reset", "yet /health says ok"),
    "lost task": ([{"kind": "lost_task", "atStep": 3}], "instance", "the task is lost"),
    "error": ([{"kind": "error", "atStep": 0}], "step", "answers 500 instead of 200 (fault on demand"),
    "error by chance": ([{"kind": "error", "probability": 0.9, "seed": 3}], "step", "answers 500 instead of 200"),
    "no verdict": ([{"kind": "error", "calls": ["evaluate"]}], "evaluate", "answers 500 instead of 200"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", SICK)
async def test_a_sick_phone_is_found_out(name):
    faults, rule, words = SICK[name]
    async with phones() as server:
        await server.set_faults(0, *faults)
        checking = asyncio.create_task(check(server.url(), LATE))
        if name == "slow":
            await until(lambda: server.slots[0].episode)  # it was reset, and takes its time to say so
            put_forward(LATE)
        violations = await impatient(checking, server.hung)
        found = [v for v in violations if v.rule == rule and words in v.words]
        assert found, "\n".join(map(str, violations))
        await server.set_faults(0)
        assert await check(server.url(), LATE) == []  # faults off: healthy again


def test_a_crash_is_found_out(start_server):
    running = start_server("--faults", json.dumps([{"kind": "crashed", "atStep": 4}]))
    violations = asyncio.run(check(running.url(0), LATE))
    assert running.process.wait(timeout=60) == 1
    assert [v.rule for v in violations] == ["step"]
    assert "the server is gone" in violations[0].words


class Forgetful(Slot):
    """Executes a step again when it is sent again."""

    def step(self, episode, index, action):
        running = self._running(episode)
        running.results[index:] = []
        return super().step(episode, index, action)


class Open(Slot):
    """Serves anybody, in any order."""

    def step(self, episode, index, action):
        running = self.episode
        index = min(index, len(running.results))
        return super().step(running.id, index, action)

    def evaluate(self, episode):
        return self.episode.phone.evaluate()

    def close(self, episode):
        pass


class Anybodys(Claims):
    """Of whoever asks."""

    def admit(self, fence):
        pass


class Trusting(Slot):
    """Doesn't look at claims."""

    def __init__(self, *args):
        super().__init__(*args)
        self.claims = Anybodys()


class Dice(Slot):
    """Another phone at every reset."""

    def reset(self, episode, task):
        self.resets = getattr(self, "resets", 0) + 1
        return super().reset(episode, task.model_copy(update={"seed": self.resets}))


class Endless(Slot):
    """Never done."""

    def step(self, episode, index, action):
        result = super().step(episode, index, action)
        return StepResult(result.observation)


class Agreeable(Slot):
    """Takes any task there is none of for the first of its list."""

    def reset(self, episode, task):
        if "no-such-name" in (task.suite, task.template):
            task = catalog.tasks("quickstart", "train").sample(0, 0)
        return super().reset(episode, task)


BROKEN = {
    Forgetful: ("idempotent step", "answered with different bytes"),
    Open: ("fence", "answers 200 instead of 409"),
    Trusting: ("claim", "by an older claim: POST /step answers 200 instead of 409"),
    Dice: ("determinism", "gave different bytes"),
    Endless: ("end", "done is false"),
    Agreeable: ("unknown name", "answers 200 instead of 404"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", BROKEN)
async def test_a_server_that_breaks_a_rule_is_found_out(kind):
    rule, words = BROKEN[kind]
    app = application([kind(96, 160, ["quickstart"])], [], asyncio.Event())
    async with TestServer(app) as running:
        violations = await check(str(running.make_url("/")), LATE)
    assert [v for v in violations if v.rule == rule and words in v.words], "\n".join(map(str, violations))


async def shown(kind: type[Slot], rule: str, words: str) -> tuple[str, str]:
    """The request that showed a violation, and what it answers when a shell sends it again."""
    app = application([kind(96, 160, ["quickstart"])], [], asyncio.Event())
    async with TestServer(app) as running:
        violations = await check(str(running.make_url("/")), LATE)
        request = next(v.request for v in violations if v.rule == rule and words in v.words)
        sent = await asyncio.create_subprocess_shell(
            f"{request} -o /dev/null -w %{{http_code}}", stdout=asyncio.subprocess.PIPE
        )
        return request, (await sent.communicate())[0].decode()


async def test_a_violation_comes_with_the_request_that_shows_it_again(monkeypatch):
    packages.ensure({"curl": "curl"})
    request, status = await shown(Agreeable, "unknown name", "suite 'no-such-name'")
    assert request.startswith("curl -sS -X POST http://127.0.0.1:") and '"suite": "no-such-name"' in request
    assert status == "200"  # instead of 404
    request, _ = await shown(Trusting, "claim", "by an older claim: POST /step")
    assert "-H 'Tapforge-Fence: 1'" in request
    monkeypatch.setenv("TAPFORGE_PHONE_TOKEN", "it's-a-secret")
    request, _ = await shown(Open, "fence", "answers 200")
    assert "$TAPFORGE_PHONE_TOKEN" in request and "secret" not in request


@pytest.mark.asyncio
async def test_something_else_on_the_port_is_named():
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/{tail:.*}", hello)
    async with TestServer(app) as running:
        violations = await check(str(running.make_url("/")), LATE)
    assert "not a JSON object" in violations[0].words
    assert {v.rule for v in violations} == {"health", "tasks"}


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ("exact", "states are keyed by exact keys"),
        ("ui", "states are keyed by UI trees, within the app"),
        ("frame", "states are keyed by frames, within the app"),
    ],
)
def test_it_says_by_what_states_are_told(start_server, capsys, states, words):
    assert run_check(start_server("--states", states).url(), LATE) == 0
    assert words in capsys.readouterr().out.splitlines()


def test_run_check_prints_and_returns_an_exit_code(server, capsys):
    assert run_check(server.url(2), LATE) == 0
    assert "conforms to tapforge/1" in capsys.readouterr().out
    assert run_check("http://127.0.0.1:1") == 1
    assert "nothing answers there" in capsys.readouterr().out
    assert run_check("127.0.0.1:80") == 2
