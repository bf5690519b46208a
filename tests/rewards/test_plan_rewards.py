"""What `tapforge plan` says of rewards."""

import pytest
from test_streams import JUDGE

from tapforge_api import load
from tapforge_api.learning import Stop
from tapforge_trainer.run.learning_errors import reward_errors
from tapforge_trainer.run.plan_rewards import judge_budget, notes_on_rewards, rewards_line, verdicts_per_update

HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"


def spec_of(url: str = "http://127.0.0.1:9/v1", **more):
    model = {**JUDGE["models"][0], "url": url, "samples": 3, "temperature": 1.0, "concurrency": 4}
    streams = [{"name": "judge", "judge": {"models": [model]}, "weight": 0.5}]
    return load(
        HEAD, ["rollout={groupSize: 4, groupsPerUpdate: 2}", f"rewards={ ({'streams': streams, **more})!r}"]
    ).spec


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1:8001/v1", None),
        ("http://[::1]:8001/v1", None),
        ("http://localhost:8001/v1", None),
        ("http://judge:8001/v1", None),
        ("http://judge.team.svc:8001/v1", None),
        ("http://10.1.2.3:8001/v1", None),
        ("https://api.example.com/v1", "api.example.com"),
        ("http://8.8.8.8:8001/v1", "8.8.8.8:8001"),
        ("http://[2001:4860:4860::8888]:8001/v1", "[2001:4860:4860::8888]:8001"),
    ],
)
def test_where_screens_are_sent_is_named_unless_it_is_near(url, named):
    notes = notes_on_rewards(spec_of(url, success="judge"))
    assert notes == ([f"screens of the phones are sent to {named}"] if named else [])


def test_streams_and_verdicts():
    spec = spec_of(success="judge", verifier="ignored")
    assert rewards_line(spec) == "0.5 x judge; judge says what succeeded, from 0.5 on, and no environment is asked"
    assert verdicts_per_update(spec) == "judge: 8, 3 votes each, 4 questions at once"
    evaluation = spec.evaluation.model_copy(update={"judged": True, "episodes": 20, "repeats": 2})
    measured = spec.model_copy(update={"evaluation": evaluation})
    assert verdicts_per_update(measured).endswith("at once; for a measurement 60 instead")
    assert "refine what outcomes tell" in notes_on_rewards(spec_of())[0]


def test_what_judges_may_use_and_what_that_buys():
    spec = spec_of(success="judge")
    assert judge_budget(spec) == ""
    limited = spec.model_copy(update={"stop": Stop(max_updates=10, judge_tokens=480_000, judge_money=1.2)})
    # 10 updates of 8 episodes with 3 votes each
    assert judge_budget(limited) == (
        "480,000 tokens, for each of 240 votes 2,000; 1.2 of money, for each of 240 votes 0.005; then the run suspends "
        "itself after a checkpoint, until it is raised"
    )
    none = load(HEAD, ["stop.judgeTokens=5"]).spec
    assert judge_budget(none) == "" and "rewards has none" in notes_on_rewards(none)[0]


def test_money_needs_a_price():
    run = load(HEAD, [f"rewards={ ({'streams': [{'name': 'judge', 'judge': JUDGE}]})!r}", "stop.judgeMoney=1.5"])
    assert any("no model of a judge has a price" in why for why in reward_errors(run))
