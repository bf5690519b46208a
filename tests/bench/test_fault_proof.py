"""What the fault campaign proves from logs: nothing where nothing is wrong, and all that is planted."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from faults import RULES, Campaign, Played, play
from load.faulty import SPELLS, faults_of, sick_phones, spells
from load.proof import Proof, Served, prove

from tapforge_trainer.recording.reader import Recording
from tapforge_trainer.records import EpisodeRecord, GroupRecord

CAMPAIGN = Campaign(phones=8, sick=(1, 5), updates=2, seed=3, median_seconds=0.05, patience=80.0)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A small campaign: what the phones wrote down, what the run recorded, and what it learned from."""
    return asyncio.run(play(CAMPAIGN, tmp_path_factory.mktemp("campaign") / "run"))


class Tampered:
    """A recording with other episodes than were recorded."""

    def __init__(self, recording: Recording, change: Callable[[EpisodeRecord], EpisodeRecord]):
        self.frames = recording.frames
        self._recording = recording
        self._change = change

    def episodes(self) -> list[EpisodeRecord]:
        return [self._change(episode) for episode in self._recording.episodes()]

    def groups(self) -> list[GroupRecord]:
        return [replace(g, episodes=tuple(map(self._change, g.episodes))) for g in self._recording.groups()]


def again(played: Played, log: list[Served] | None = None, recording: Tampered | None = None) -> Proof:
    groups = CAMPAIGN.updates * CAMPAIGN.groups_per_update
    return prove(log or played.log, recording or played.recording, RULES, played.learned, groups)


def sampled(played: Played) -> list[EpisodeRecord]:
    """Episodes with samples."""
    names = {name for name, _ in played.learned}
    return [episode for episode in played.recording.episodes() if episode.id in names]


def changed(played: Played, which: Callable[[Served], bool], **change) -> list[Served]:
    """The log with one line changed."""
    at = next(i for i, served in enumerate(played.log) if which(served))
    return [*played.log[:at], replace(played.log[at], **change), *played.log[at + 1 :]]


def only(played: Played, name: str, change: Callable[[EpisodeRecord], EpisodeRecord]) -> Tampered:
    return Tampered(played.recording, lambda e: change(e) if e.id == name else e)


def test_nothing_is_found_where_nothing_is_wrong(played):
    assert played.proof.samples == len(played.learned) > 0
    assert played.proof.poisoned == {} and played.proof.double_holders == []
    assert played.proof.faults, "the sick phones of this campaign were sick"


def test_a_frame_that_was_answered_with_a_fault_is_found(played):
    picture = sampled(played)[0].steps[0].frames[-1]
    log = changed(played, lambda s: s.picture == picture and s.right, fault="corrupt")
    assert "is of an answer with fault corrupt" in again(played, log).poisoned[sampled(played)[0].id, 0]


def test_a_frame_of_another_phone_is_found(played):
    ours, other = sampled(played)[0], next(e for e in sampled(played) if e.slot != sampled(played)[0].slot)
    foreign = other.steps[0].frames
    tampered = only(played, ours.id, lambda e: replace(e, steps=(replace(e.steps[0], frames=foreign), *e.steps[1:])))
    assert f"the recording says {ours.slot}" in again(played, recording=tampered).poisoned[ours.id, 0]


def test_a_frame_of_an_earlier_step_is_found(played):
    ours = next(e for e in sampled(played) if len(e.steps) > 1)
    stale = replace(ours.steps[1], frames=ours.steps[0].frames)
    tampered = only(played, ours.id, lambda e: replace(e, steps=(e.steps[0], stale, *e.steps[2:])))
    assert "should be after step 0" in again(played, recording=tampered).poisoned[ours.id, 1]


def test_a_frame_that_no_phone_showed_is_found(played):
    ours = sampled(played)[0]
    tampered = only(
        played, ours.id, lambda e: replace(e, steps=(replace(e.steps[0], frames=("0" * 64,)), *e.steps[1:]))
    )
    assert "no phone showed" in again(played, recording=tampered).poisoned[ours.id, 0]


def test_a_step_that_went_wrong_is_found(played):
    ours = next(e for e in sampled(played) if e.steps[0].action is not None)
    there = next(s.episode for s in played.log if s.picture == ours.steps[0].frames[-1])
    log = changed(played, lambda s: (s.episode, s.call, s.index) == (there, "step", 0), status=500, fault="error")
    assert "never answered right" in again(played, log).poisoned[ours.id, 0]
    log = changed(played, lambda s: (s.episode, s.call, s.index) == (there, "step", 0), action={"type": "home"})
    assert "was asked as" in again(played, log).poisoned[ours.id, 0]


def test_a_verdict_that_no_phone_gave_is_found_at_every_step_of_its_episode(played):
    ours = next(e for e in sampled(played) if e.score is not None)
    for score in (0.0, 1.0):
        found = again(played, recording=only(played, ours.id, lambda e, score=score: replace(e, score=score)))
        assert {name for name, _ in found.poisoned} == {ours.id}
        assert "is none that the phone gave" in found.poisoned[ours.id, 0]


def test_a_sample_that_was_not_recorded_is_found(played):
    groups = CAMPAIGN.updates * CAMPAIGN.groups_per_update
    found = prove(played.log, played.recording, RULES, {*played.learned, ("unknown", 0)}, groups)
    assert found.poisoned == {("unknown", 0): "was learned from, but not recorded"}


def test_two_episodes_at_once_are_found(played):
    by_slot: dict[str, list[EpisodeRecord]] = {}
    for episode in played.recording.episodes():
        by_slot.setdefault(episode.slot, []).append(episode)
    first, second = next(sorted(es, key=lambda e: e.started)[:2] for es in by_slot.values() if len(es) > 1)
    earlier = first.ended - 0.01
    tampered = only(played, second.id, lambda e: replace(e, started=earlier))
    assert again(played, recording=tampered).double_holders == [
        f"{first.slot}: {second.id} began 0.010 s before {first.id} ended"
    ]


def test_a_call_of_an_episode_that_another_one_followed_is_found(played):
    phone = played.log[0].phone
    resets = [s for s in played.log if s.phone == phone and s.call == "reset"]
    late = replace(resets[0], call="step", index=7, at=resets[1].at + 0.001)
    at = played.log.index(resets[1]) + 1
    found = again(played, [*played.log[:at], late, *played.log[at:]]).double_holders
    assert found == [f"{phone}: step of {late.episode} arrived after {resets[1].episode} had begun"]


def test_the_schedule_is_the_seed_s_and_has_every_kind():
    assert sick_phones(64, 0.3, 0) == sick_phones(64, 0.3, 0) != sick_phones(64, 0.3, 1)
    assert len(sick_phones(64, 0.3, 0)) == 19
    plan = spells(0, 7, 600, 0.6)
    assert plan == spells(0, 7, 600, 0.6) != spells(0, 8, 600, 0.6)
    assert {spell.kind for spell in plan[: len(SPELLS)]} == set(SPELLS)
    assert plan[-1].ends >= 600 and [s.ends for s in plan] == sorted(s.ends for s in plan)
    for kind in SPELLS:
        usual, fault = faults_of(kind, 0.5, 0)
        assert (usual.kind, fault.kind) == ("slow", kind)
