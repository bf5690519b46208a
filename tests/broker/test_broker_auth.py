"""Who may claim slots of which pool, and as whom."""

from __future__ import annotations

import asyncio

import pytest
from callers import Callers, jwt

from tapforge_operator.broker.auth import Auth, Denied


class Time:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def callers() -> Callers:
    callers = Callers()
    callers.add_run()
    return callers


def auth_of(callers: Callers, monotonic: Time | None = None, wall: Time | None = None) -> Auth:
    return Auth(callers, callers.find_pool, monotonic=monotonic or Time(), wall=wall or Time())


async def denied(auth: Auth, token: str, namespace: str = "lab", pool: str = "phones") -> Denied:
    with pytest.raises(Denied) as caught:
        await auth.holder(token, namespace, pool)
    return caught.value


@pytest.mark.parametrize("pod", ["train-head", "train-submitter"])
async def test_every_pod_of_a_run_is_the_run(callers, pod):
    holder = await auth_of(callers).holder(callers.token_of(pod), "lab", "phones")
    assert (holder.name, holder.run) == ("run/lab/train/uid-of-train", "train")


@pytest.mark.parametrize(
    ("source", "limits"),
    [
        ({"pool": {"name": "phones", "slots": 3, "priority": 7}}, (3, 7)),
        ({"pool": {"name": "phones"}}, (16, 0)),
        ({"ownPool": {"slots": 2, "spec": {}}}, (2, 0)),
    ],
)
async def test_what_a_runs_spec_says_is_as_much_as_its_pods_may_have(callers, source, limits):
    run = "/apis/tapforge.dev/v1alpha1/namespaces/lab/trainingruns/train"
    callers.objects[run]["spec"]["environment"]["source"] = source
    callers.add_pool("lab", "train", owner={"kind": "TrainingRun", "uid": "uid-of-train"})
    pool = "phones" if "pool" in source else "train"
    holder = await auth_of(callers).holder(callers.token_of("train-head"), "lab", pool)
    assert (holder.slots, holder.priority) == limits
    assert [holder.bounded(asked) for asked in (-5, 3, 1000)] == [-5, min(3, limits[1]), limits[1]]


async def test_a_run_claims_from_its_own_pool_only(callers):
    callers.add_pool("lab", "others")
    callers.add_pool("elsewhere", "phones")
    auth, token = auth_of(callers), callers.token_of("train-head")
    error = await denied(auth, token, pool="others")
    assert error.status == 403
    assert "uses EmulatorPool phones, not others" in str(error)
    error = await denied(auth, token, namespace="elsewhere")
    assert error.status == 403
    assert "is in namespace lab" in str(error)
    callers.add_run("alone", pool="")
    assert "uses no EmulatorPool" in str(await denied(auth, callers.token_of("alone-head")))


async def test_a_pool_that_was_made_for_the_run_is_its_own(callers):
    callers.add_run("alone", pool="")
    callers.add_pool("lab", "alone-pool", owner={"kind": "TrainingRun", "uid": "uid-of-alone"})
    auth = auth_of(callers)
    assert (await auth.holder(callers.token_of("alone-head"), "lab", "alone-pool")).run == "alone"
    assert (await denied(auth, callers.token_of("train-head"), pool="alone-pool")).status == 403


@pytest.mark.parametrize(
    "break_", ["pod uid", "job uid", "no controller", "other kind", "version", "gone", "deep", "no pod", "..", "."]
)
async def test_a_chain_that_does_not_hold_makes_nobody_a_run(callers, break_):
    pod = callers.objects["/api/v1/namespaces/lab/pods/train-head"]
    job = "/apis/ray.io/v1/namespaces/lab/rayjobs/train-0"
    uid = ""
    match break_:
        case "pod uid":
            uid = "another-pod"
        case "job uid":
            callers.objects[job]["metadata"]["uid"] = "another"
        case "no controller":
            pod["metadata"]["ownerReferences"][0]["controller"] = False
        case "other kind":
            pod["metadata"]["ownerReferences"][0] |= {"kind": "Secret", "apiVersion": "v1"}
        case "version":
            pod["metadata"]["ownerReferences"][0]["apiVersion"] = "ray.io/../../v1"
        case ".." | ".":  # the API server takes any name in a reference, of an object that nobody can have made
            pod["metadata"]["ownerReferences"][0]["name"] = break_
        case "gone":
            del callers.objects[job]
        case "deep":
            path = "/apis/tapforge.dev/v1alpha1/namespaces/lab/trainingruns/train"
            for number in range(6):
                path = callers.add(f"/apis/batch/v1/namespaces/lab/jobs/j{number}", "Job", ("batch/v1", path))
            callers.add("/api/v1/namespaces/lab/pods/train-head", "Pod", ("batch/v1", path))
        case "no pod":
            del callers.objects["/api/v1/namespaces/lab/pods/train-head"]
    token = callers.token_of("train-head", uid=uid)
    auth = auth_of(callers)
    assert (await denied(auth, token)).status == 403
    # As a mere service account it needs the right of one.
    callers.allowed.add(("system:serviceaccount:lab:default", "lab", "phones"))
    holder = await auth_of(callers).holder(token, "lab", "phones")
    assert (holder.name, holder.run) == ("user/system:serviceaccount:lab:default", "")


async def test_others_need_the_right(callers):
    token = callers.token_for("ann")
    auth = auth_of(callers)
    error = await denied(auth, token)
    assert (error.status, error.reason) == (403, "Forbidden")
    assert "create emulatorpools/claim" in str(error)
    callers.allowed.add(("ann", "lab", "phones"))
    holder = await auth_of(callers).holder(token, "lab", "phones")
    assert (holder.name, holder.run) == ("user/ann", "") and holder.slots == 0 and holder.bounded(9) == 9
    assert (await denied(auth_of(callers), token, pool="others")).status == 403


@pytest.mark.parametrize("token", ["", "x" * 20_000, "nonsense", jwt("nobody"), "a.b.c", "..", "ü.ü.ü", "a.W10.c"])
async def test_what_is_no_token_of_anybody(callers, token):
    error = await denied(auth_of(callers), token)
    assert (error.status, error.reason) == (401, "Unauthorized")


@pytest.mark.parametrize("audiences", [[], ["other"], None])
async def test_a_token_for_somebody_else_is_refused(callers, audiences):
    token = callers.token_of("train-head")
    callers.audiences = audiences
    assert (await denied(auth_of(callers), token)).status == 401


async def test_an_answer_is_used_for_ten_seconds(callers):
    now = Time()
    auth, token = auth_of(callers, now), callers.token_of("train-head")
    for _ in range(3):
        await auth.holder(token, "lab", "phones")
    assert callers.asked.count("TokenReview") == 1
    del callers.users[token]
    now.now += 9.9
    await auth.holder(token, "lab", "phones")
    now.now += 0.2
    assert (await denied(auth, token)).status == 401


@pytest.mark.parametrize("left", [-5.0, 0.0, 3.0])
async def test_and_never_beyond_the_tokens_own_end(callers, left):
    now, wall = Time(), Time()
    token = callers.token_of("train-head", exp=wall.now + left)
    auth = auth_of(callers, now, wall)
    await auth.holder(token, "lab", "phones")
    del callers.users[token]
    now.now += max(0.0, left) + 0.01
    wall.now += max(0.0, left) + 0.01
    assert (await denied(auth, token)).status == 401


async def test_a_refused_token_is_not_asked_about_again_and_again(callers):
    auth = auth_of(callers)
    for _ in range(5):
        await denied(auth, "forged")
    assert callers.asked == ["TokenReview"]


async def test_one_question_for_all_who_ask_at_once(callers):
    auth, token = auth_of(callers), callers.token_of("train-head")
    calls = [asyncio.create_task(auth.holder(token, "lab", "phones")) for _ in range(20)]
    await asyncio.sleep(0)
    calls[0].cancel()
    holders = await asyncio.gather(*calls[1:])
    assert {h.run for h in holders} == {"train"}
    assert callers.asked.count("TokenReview") == 1


async def test_whom_nobody_can_check_is_refused_for_now(callers):
    auth, token = auth_of(callers), callers.token_of("train-head")
    callers.down = True
    error = await denied(auth, token)
    assert (error.status, error.reason) == (503, "CannotAuthenticate")
    callers.down = False
    assert (await auth.holder(token, "lab", "phones")).run == "train"


async def test_a_caller_that_keeps_asking_never_waits_for_a_review(callers):
    clock = Time()
    auth, token = auth_of(callers, monotonic=clock), callers.token_for("ann")
    callers.allowed.add(("ann", "lab", "phones"))
    await auth.holder(token, "lab", "phones")
    for _ in range(10):
        clock.now += 6
        before = len(callers.asked)
        await auth.holder(token, "lab", "phones")
        assert len(callers.asked) == before  # what is known was enough for the answer
        await asyncio.sleep(0.01)
        assert callers.asked[before:] == ["TokenReview", "SubjectAccessReview"]  # and is fresh again


async def test_what_was_refused_meanwhile_is_refused_when_the_trust_ends(callers):
    clock = Time()
    auth, token = auth_of(callers, monotonic=clock), callers.token_for("ann")
    callers.allowed.add(("ann", "lab", "phones"))
    await auth.holder(token, "lab", "phones")
    callers.allowed.clear()
    clock.now += 6
    await auth.holder(token, "lab", "phones")
    await asyncio.sleep(0.01)
    assert (await denied(auth, token)).status == 403
    asked = len(callers.asked)
    clock.now += 6
    assert (await denied(auth, token)).status == 403
    await asyncio.sleep(0.01)
    assert callers.asked[asked:] == ["TokenReview"]  # nobody asks ahead whether it may again


async def test_an_api_server_that_is_away_while_it_is_asked_ahead_costs_nobody_anything(callers):
    clock = Time()
    auth, token = auth_of(callers, monotonic=clock), callers.token_of("train-head")
    await auth.holder(token, "lab", "phones")
    callers.down = True
    clock.now += 6
    for _ in range(3):
        assert (await auth.holder(token, "lab", "phones")).run == "train"
        await asyncio.sleep(0.01)
    clock.now += 6
    assert (await denied(auth, token)).status == 503
