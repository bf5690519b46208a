"""`tapforge plan`: what a run would do, and what keeps it from starting."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_api import TrainingRun, load
from tapforge_api.environment import CallSeconds
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.run import assembly
from tapforge_trainer.run.local_files import LocalFiles, inspect_files
from tapforge_trainer.run.plan import plan, render

HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"


def run(*overrides: str) -> TrainingRun:
    return load(HEAD, overrides)


def test_the_numbers() -> None:
    p = plan(
        run(
            "rollout.groupSize=4",
            "rollout.groupsPerUpdate=6",
            "rollout.maxStaleness=2",
            "learner.miniBatches=3",
            "stop.maxUpdates=10",
            "model.contextTokens=1000",
            "rollout.responseTokens=100",
            "evaluation={episodes: 50, repeats: 2, everyUpdates: 5}",
            "warmStart={steps: 7, batchSize: 3}",
            "engine={replicas: 2, maxConcurrentSequences: 8}",
        )
    )
    assert (p.episodes_per_update, p.episodes, p.optimizer_steps, p.groups_in_flight) == (24, 240, 30, 18)
    assert (p.prompt_tokens, p.sequences_at_once, p.warm_start_answers) == (900, 16, 21)
    assert (p.evaluation_episodes, p.evaluations) == (150, 3)  # before, after 5 of 10 updates, at the end


@pytest.mark.parametrize(
    ("every", "updates", "times"), [(0, 10, 2), (5, 10, 3), (5, 11, 4), (10, 10, 2), (11, 10, 2), (1, 3, 4)]
)
def test_evaluations_are_before_between_and_after(every: int, updates: int, times: int) -> None:
    assert plan(run(f"evaluation.everyUpdates={every}", f"stop.maxUpdates={updates}")).evaluations == times


@pytest.mark.parametrize(
    ("staleness", "mini_batches", "source"), [(0, 1, "engine"), (0, 2, "learner"), (1, 1, "learner"), (1, 2, "learner")]
)
def test_only_a_strictly_on_policy_run_trusts_the_engines_log_probabilities(
    staleness: int, mini_batches: int, source: str
) -> None:
    assert plan(run(f"rollout.maxStaleness={staleness}", f"learner.miniBatches={mini_batches}")).old_logprobs == source


def test_the_screens_of_a_prompt() -> None:
    phone = ("environment.screen={width: 1080, height: 2400}", "model.contextTokens=8192", "rollout.responseTokens=192")
    three = (*phone, "model.adapter.historyImages=3")
    assert plan(run(*phone)).screens.startswith("1 screen per prompt, of at most 2,592,000 pixels (2,531 visual")
    assert plan(run(*three)).screens.startswith("3 screens per prompt, of at most 2,048,000 pixels (2,000 visual")
    bound = run(*three, "model.adapter.maxPixels=1000000")
    assert "3 screens per prompt, of at most 1,000,000 pixels (976 visual tokens" in render(plan(bound))


def test_a_reference_is_loaded_for_a_kl_term_only() -> None:
    assert not plan(run()).reference
    assert plan(run("algorithm.kl.coefficient=0.01")).reference
    assert "no reference model" in render(plan(run()))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("{dualClip: 3, importanceCap: 5}", "dual clip 3, token_mean, anchor old, importance weight at most 5,"),
        (
            "{plugin: {name: cispo, options: [{name: clip_high, value: '4'}]}, anchor: behavior}",
            "loss cispo (clip_low 0.2, clip_high 4.0), token_mean, anchor behavior, no KL",
        ),
        (
            "{corrections: {veto: {}, opsm: {above: 0.2}}}",
            "anchor old, importance weight at most 2, veto (below 0.0001), opsm (above 0.2, against behavior),",
        ),
        (
            "{entropyBonus: 0.001, topEntropy: {}, corrections: {secondMoment: {}}}",
            "top entropy (share 0.2, over step), entropy bonus 0.001, importance weight at most 2, second_moment (t",
        ),
        ("{aggregation: constant}", "by token, constant 256, anchor old,"),
        ("{corrections: {truncate: {}}}", "anchor old, truncate (by token, cap 2.0), no KL"),
        ("{plugin: {name: theirs, options: [{name: a, value: b}]}}", "loss theirs (a b), token_mean,"),
    ],
)
def test_the_loss_is_told_as_it_is_written(loss: str, words: str) -> None:
    assert words in plan(run(f"algorithm.loss={loss}")).algorithm


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["sync.lora=adapter", "model.lora.rank=48"], "adapters    of rank 48; engines get them alone, as rank 64,"),
        (
            ["sync.lora=adapter"],
            "of rank 32; engines get them alone, and round as the learner does (sync.lora",
        ),
        ([], "engines get whole weights with them merged, which is exact in float32 and rounds small changes away"),
        (["model.dtype=float32"], "with them merged, which is exact in float32\n"),
    ],
)
def test_how_engines_get_adapters_is_told_and_why(sets: list[str], words: str) -> None:
    assert words in render(plan(run("model.lora={}", *sets)))
    assert "adapters" not in render(plan(run()))


def test_a_weight_is_told_where_there_is_one() -> None:
    """On policy the engine's log-probabilities are the old ones, and their ratio to themselves weighs nothing."""
    assert (
        "weight" not in plan(run("algorithm.loss.importanceCap=5", "rollout.maxStaleness=0")).algorithm.split("clip")[1]
    )


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            ["algorithm.loss.plugin.name=kl_cov"],
            "kl_cov over each optimizer step: a forward pass without gradients bef",
        ),
        (["algorithm.loss.corrections.secondMoment={}"], "without gradients before each optimizer step,"),
        (["algorithm.loss.corrections.secondMoment={}", "learner.miniBatches=4"], "before the first optimizer step of"),
        (
            ["algorithm.advantage.plugin.name=otb", "algorithm.kl={place: reward, estimator: k1, coefficient: 0.1}"],
            "otb, kl in the reward before advantages: a forward pass of the policy and one of the reference, without",
        ),
        (["algorithm.loss.topEntropy={}", "learner.miniBatches=4"], "without gradients before each optimizer step,"),
    ],
)
def test_what_a_pass_over_a_whole_step_is_for_is_told_with_its_cost(sets: list[str], words: str) -> None:
    assert words in render(plan(run(*sets)))


@pytest.mark.parametrize("sets", [["algorithm.loss.topEntropy={over: micro_batch}"], ["algorithm.loss.entropyBonus=1"]])
def test_what_takes_no_pass_is_not_told_to(sets: list[str]) -> None:
    assert not plan(run(*sets)).statistics


@pytest.mark.parametrize(
    ("loss", "source"), [("{anchor: behavior}", "engine"), ("{corrections: {range: {}}}", "learner")]
)
def test_the_anchor_and_corrections_decide_what_is_recomputed(loss: str, source: str) -> None:
    on_policy = loss != "{anchor: behavior}"
    staleness = "rollout.maxStaleness=0" if on_policy else "learner.miniBatches=4"
    assert plan(run(f"algorithm.loss={loss}", staleness)).old_logprobs == source


@pytest.mark.parametrize(
    ("overrides", "files", "slots", "at_once"),
    [
        (["environment.source.processes.count=5"], LocalFiles(), 5, 5),
        (["environment.source.processes.count=5", "rollout.concurrency=3"], LocalFiles(), 5, 3),
        (["environment.source.processes.count=5", "rollout.concurrency=9"], LocalFiles(), 5, 5),
        (["environment.source.urls.list=[http://a, http://b]"], LocalFiles(), 2, 2),
        (["environment.source.urls.file=f"], LocalFiles(urls=7), 7, 7),
        (["environment.source.urls.file=f"], LocalFiles(), None, None),
        (["environment.source.pool.name=p", "rollout.concurrency=4"], LocalFiles(), None, 4),
    ],
)
def test_slots(overrides: list[str], files: LocalFiles, slots: int | None, at_once: int | None) -> None:
    p = plan(run(*overrides), files)
    assert (p.slots, p.concurrency) == (slots, at_once)


def test_no_member_of_a_group_is_left_out_for_being_slow_by_default() -> None:
    spec = run("rollout.maxReruns=3", "environment.deadlines.episodeSeconds=50")
    assert plan(spec).notes == () and assembly.group_limits(spec).deadline_seconds == 4 * 50
    short = run("rollout.groupDeadlineSeconds=7")
    assert assembly.group_limits(short).deadline_seconds == 7


def test_groups_are_judged_by_the_episodes_that_batches_compare() -> None:
    assert not assembly.group_limits(run()).mask_step_limit
    assert not assembly.group_limits(run("algorithm.truncated.answers=masked")).mask_step_limit
    assert assembly.group_limits(run("algorithm.truncated.episodes=masked")).mask_step_limit


def test_servers_of_others_get_more_time_by_default_and_what_is_given_counts_for_all() -> None:
    own, others = (
        run(f"environment={{protocol: {protocol}, source: {{urls: {{list: ['http://a:1']}}}}}}").spec.environment
        for protocol in ("tapforge", "mobileworld")
    )
    assert own.call_seconds == CallSeconds(30, 15, 15, 600)
    assert others.call_seconds == CallSeconds(300, 60, 120, 1800)
    given = "environment.deadlines={resetSeconds: 1, stepSeconds: 2, evaluateSeconds: 3, episodeSeconds: 4}"
    assert run(given).spec.environment.call_seconds == CallSeconds(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["rollout.concurrency=9"], "rollout.concurrency is 9, but only 2 slots exist"),
        (["environment.source.processes.count=65"], "65 episodes at once, but the engines sample 64"),
        (
            ["environment.source.processes.count=64", "rollout={groupsPerUpdate: 2, groupSize: 2}"],
            "admits 8: slots will",
        ),
        (["algorithm.loss.ratio=sequence"], "the ratio is 1 at the only optimizer step"),
        (
            ["rollout.dynamicSampling.enabled=true", "algorithm.signal=reward"],
            "rollout.dynamicSampling replaces groups that ended alike, but here they may teach: algorithm.signal is",
        ),
        (
            ["rollout.dynamicSampling.enabled=true", "algorithm.advantage.plugin.name=reinforce_plus_plus"],
            "here they may teach: reinforce_plus_plus compares them with the whole batch",
        ),
        (
            ["algorithm.states=actions", "algorithm.advantage.plugin.name=opo"],
            "algorithm.states changes nothing: opo compares no states",
        ),
        (
            ["algorithm.distillation={teacher: {path: {folder: t}}, kind: k1, topK: 16}"],
            "algorithm.distillation.topK changes nothing: k1 compares the sampled token alone",
        ),
        (["algorithm.loss.plugin.name=cispo"], "the ratio is 1 at the only optimizer step"),
        (["algorithm.loss={anchor: behavior, plugin: {name: gspo}}"], "in bfloat16 rounding alone"),
        (["algorithm.loss.plugin.name=gspo", "rollout.maxStaleness=0"], "in bfloat16 rounding alone"),
        (["algorithm.loss={ratio: sequence, clipLow: 0.001, anchor: behavior}"], "in bfloat16 rounding alone"),
        (
            [
                "algorithm.loss.anchor=behavior",
                "algorithm.loss.plugin.name=ppo",
                "algorithm.loss.plugin.options=[{name: ratio, value: sequence}, {name: clip_low, value: '3e-4'}]",
            ],
            "in bfloat16 rounding alone",
        ),
        (["algorithm.loss.corrections.opsm.against=old"], "against old masks nothing"),
        (["rollout.groupsPerUpdate=15", "learner.miniBatches=2"], "15 groups don't divide into 2 equal minibatches"),
        (["learner.tokensPerMicroBatch=64"], "a sample may have 8192 tokens"),
        (["environment.deadlines.stepSeconds=601"], "stepSeconds is longer than episodeSeconds"),
        (["rollout.groupDeadlineSeconds=1799"], "slow members are left out"),
        (["evaluation.tasks.split=train"], "nothing is held out"),
        (["tasks={file: f, suite: s}"], "tasks.suite and tasks.split choose no tasks"),
        (["environment.source.pool.name=p"], "needs a cluster"),
    ],
)
def test_what_is_allowed_and_probably_not_meant_is_noted(overrides: list[str], note: str) -> None:
    p = plan(run(*overrides))
    assert len(p.notes) == 1 and note in p.notes[0]
    assert f"note: {p.notes[0]}" in render(p)


@pytest.mark.parametrize(
    "overrides",
    [
        ["device=cpu"],
        ["model.dtype=float32"],
        ["algorithm.loss.clipLow=0.2", "algorithm.loss.clipHigh=0.28"],
        ["algorithm.loss.anchor=old", "learner.miniBatches=2"],
        ["algorithm.loss={anchor: behavior, corrections: {opsm: {}}}"],
    ],
)
def test_a_ratio_that_stands_rounding_is_not_noted(overrides: list[str]) -> None:
    narrow = "algorithm.loss={ratio: sequence, clipLow: 0.0003, clipHigh: 0.0004, anchor: behavior}"
    assert plan(run(narrow, *overrides)).notes == ()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("pool.name=p", "up to 16 of the pool p, claimed from the operator"),
        (
            "pool={name: p, slots: 2000, priority: -3}",
            "up to 2,000 of the pool p, claimed from the operator, priority -3",
        ),
        ("urls.list=[http://a, http://b]", "2 servers by URL"),
        ("urls.file=f", "the servers in f"),
    ],
)
def test_where_phones_come_from(source: str, words: str) -> None:
    assert plan(run(f"environment.source.{source}")).phones == words


def test_defaults_need_no_note() -> None:
    assert plan(run()).notes == ()


@given(
    st.integers(2, 64), st.integers(1, 64), st.integers(0, 3), st.integers(1, 50), st.integers(0, 9), st.integers(1, 8)
)
def test_plans_are_consistent_and_can_be_shown(
    size: int, groups: int, staleness: int, updates: int, every: int, batches: int
) -> None:
    p = plan(
        run(
            f"rollout={{groupSize: {size}, groupsPerUpdate: {groups}, maxStaleness: {staleness}}}",
            f"learner.miniBatches={min(batches, groups)}",
            f"stop.maxUpdates={updates}",
            f"evaluation.everyUpdates={every}",
        )
    )
    assert p.episodes == updates * p.episodes_per_update == updates * size * groups
    assert p.groups_in_flight == (staleness + 1) * groups
    assert 2 <= p.evaluations <= 1 + updates or (updates == 1 and p.evaluations == 2)
    assert f"{groups:,} groups x {size:,} = {size * groups:,} episodes" in render(p)


@pytest.mark.parametrize(
    ("seconds", "words"), [(900, "or 15 minutes"), (90, "or 1.5 minutes"), (86_400, "or 1,440 minutes")]
)
def test_what_a_crash_costs_is_a_plain_number(seconds: int, words: str) -> None:
    assert words in render(plan(run(f"checkpoints.everySeconds={seconds}")))


def test_what_comes_again_is_in_the_plan() -> None:
    again = ("rollout.replay={share: 0.2}", "algorithm.loss.anchor=behavior")
    assert "replay      up to 25 successful episodes per update come again, of groups in which" in render(
        plan(run(*again))
    )
    assert "replay  " not in render(plan(run()))


def test_the_whole_text() -> None:
    text = render(
        plan(run("warmStart={}", "stop={maxUpdates: 1, maxSeconds: 90, targetSuccess: 0.9}", "tasks.templates=[a]"))
    )
    assert text.splitlines() == [
        "run         x, seed 0",
        "policy      the built-in tiny Qwen3-VL, bfloat16 on GPUs, float32 on CPUs",
        "loaded      1 learner rank, 1 engine with vLLM's key-value cache, no reference model",
        "phones      2 simulated phones in 1 server, 96x160 pixels",
        "slots       2; episodes at once: 2; answers sampled at once: 64",
        "tasks       suite quickstart, split train, templates a",
        "sampler     uniform, every task in its turn",
        "warm start  9,600 demonstrated answers",
        (
            "update      16 groups x 8 = 128 episodes, a sequence per step, joined where prompts extend each other, 1 "
            "optimizer step"
        ),
        (
            "staleness   at most 1 version: up to 32 groups in flight; old log-probabilities from the learner; new "
            "weights arrive mid-episode"
        ),
        "rewards     outcome + environment; the environment says what succeeded",
        (
            "algorithm   gigpo (normalization mean_std, gamma 0.95, weight 1.0), clip 0.2/0.28 by token, token_mean, "
            "anchor old, importance weight at most 2, no KL term"
        ),
        "context     8,192 tokens: prompt up to 7,936, answer up to 256",
        "screens     1 screen per prompt, of at most 15,360 pixels (15 visual tokens of 32x32)",
        (
            "evaluation  split test, 200 tasks, sampled at 1 and greedy; baselines: a random and an always-infeasible "
            "policy; 400 episodes, 2 times"
        ),
        (
            "ends        after 1 update, or after 90 s, or when 90% of all attempts of an update succeed; 128 episodes "
            "and 1 optimizer step at most"
        ),
        "written to  runs/x; checkpoints in runs/x/checkpoints",
        (
            "a crash     costs 10 updates at most, or 15 minutes and the update then under way, whichever is less; "
            "more where a checkpoint takes long to write; and the start: of the learner and the engines alone where "
            "these died, up to 3 times an hour, with the same driver and phones"
        ),
    ]


# --- local files ------------------------------------------------------------------------------------------------------


def test_files_that_are_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(SHIPPED, model)
    (tmp_path / "urls").write_text("# phones\nhttp://a:1\nb:2\n")
    (tmp_path / "tasks").write_text(
        '{"suite": "s", "template": "t", "seed": 1}\n{"suite": "s", "template": "t", "seed": 2}\n'
    )
    files = inspect_files(
        run(
            f"model.source.path.folder={model}",
            f"environment.source.urls.file={tmp_path / 'urls'}",
            f"tasks.file={tmp_path / 'tasks'}",
            f"checkpoints.resumeFrom={model}",
        ),
        tmp_path / "runs",
    )
    assert files == LocalFiles((), urls=2, tasks=2)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.source.path.folder={0}/none", "spec.model.source.path.folder: the folder {0}/none doesn't exist (what"),
        ("model.source.path.folder={0}/broken", "{0}/broken is a file, expected a folder"),
        (
            "model.source.path.folder={0}",
            "the folder {0} lacks config.json, a tokenizer (tokenizer.json or vocab.json)",
        ),
        (
            "environment.source.urls.file={0}/none",
            "spec.environment.source.urls.file: the list of phones {0}/none can't",
        ),
        ("environment.source.urls.file={0}/twice", "twice:1 and {0}/twice:3 both name http://a:1"),
        ("tasks.file={0}/none", "spec.tasks.file: the task file {0}/none can't be read"),
        ("tasks.file={0}/broken", "spec.tasks.file: {0}/broken:2: "),
        ("checkpoints.resumeFrom={0}/none", "spec.checkpoints.resumeFrom: the folder {0}/none doesn't exist"),
        ("checkpoints.directory={0}/broken/x", "{0}/broken/x can't be a folder: {0}/broken is a file"),
    ],
)
def test_files_that_are_not(tmp_path: Path, override: str, expected: str) -> None:
    (tmp_path / "broken").write_text('{"suite": "s", "template": "t"}\n{"suite": \n')
    (tmp_path / "twice").write_text("http://a:1\n\na:1\n")
    files = inspect_files(run(override.format(tmp_path)), tmp_path / "runs")
    assert len(files.errors) == 1 and expected.format(tmp_path) in files.errors[0]


def test_every_wrong_file_is_named_at_once(tmp_path: Path) -> None:
    overrides = ("tasks.file=nope", "environment.source.urls.file=nope", "model.source.path.folder=nope")
    assert len(inspect_files(run(*overrides), tmp_path).errors) == 3


def test_a_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    errors = inspect_files(run(), tmp_path / "runs").errors
    assert len(errors) == 2 and all("runs is a file" in e for e in errors)
