"""Models that the run serves: judges ask whichever server is up and has the fewest questions, with the run's token, and
wait for one that is started again; without hope they hear why."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from judged_episodes import played, serving

from tapforge_api.judge import JudgeSpec
from tapforge_envs.phone import catalog
from tapforge_trainer.judges.endpoint import Endpoints, Served
from tapforge_trainer.judges.judge import VerdictMissing, judge_of
from tapforge_trainer.judges.server import Faults, JudgeServer
from tapforge_trainer.run.assembly import ConfigurationError
from tapforge_trainer.run.calibrate import calibrate

EPISODES = [played(catalog.tasks("quickstart", "train", ["open"]).sample(1, n), f"e{n}") for n in range(6)]
OWN = JudgeSpec.model_validate(
    {"models": [{"model": "simulated-phone"}], "prompt": "simulated-phone", "deadlineSeconds": 20.0}
)


class Guarded(JudgeServer):
    """Answers who has the token."""

    def __init__(self, token: str, slow: float = 0.0):
        super().__init__("simulated-phone", faults=Faults(slow=slow))
        self.token, self.refused = token, 0

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.Response(status=401)
        return await super()._complete(request)


async def test_questions_are_shared_by_the_servers_that_are_up_and_carry_the_token() -> None:
    one, two, endpoints = Guarded("t", slow=0.2), Guarded("t", slow=0.2), Endpoints()
    judge = judge_of(OWN, "task", endpoints=endpoints)
    async with serving(one) as first, serving(two) as second:
        endpoints.serve({"simulated-phone": Served((first, second), "t")})
        verdicts = await asyncio.gather(*(judge.task(episode) for episode in EPISODES))
    await endpoints.close()
    assert all(verdict.value == 1.0 and verdict.model == "judge" for verdict in verdicts)
    assert (one.requests, two.requests, one.refused, two.refused) == (3, 3, 0, 0)


async def test_a_server_that_is_started_again_is_waited_for_and_one_that_won_t_be_is_named() -> None:
    server, endpoints = Guarded("t"), Endpoints()
    judge = judge_of(OWN, "task", endpoints=endpoints)
    asked = asyncio.create_task(judge.task(EPISODES[0]))
    await asyncio.sleep(0.1)
    assert not asked.done()
    async with serving(server) as url:
        endpoints.serve({"simulated-phone": Served((url,), "t")})
        assert (await asked).value == 1.0
        endpoints.serve({"simulated-phone": Served((), "t", "it died 4 times")})
        with pytest.raises(VerdictMissing, match=r"at spec\.models\[simulated-phone\].*it died 4 times") as error:
            await judge.task(EPISODES[1])
    await endpoints.close()
    assert error.value.permanent and "Bearer" not in str(error.value)


async def test_a_command_that_serves_no_models_says_how_to(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    with pytest.raises(ConfigurationError, match=r"has no url.*vllm serve MODEL --served-model-name simulated-phone"):
        await calibrate(tmp_path, OWN)
