"""Handles are held as long as they are needed, and no longer; what is held is bounded in bytes."""

from tapforge_trainer.rollout.held_frames import FrameBudget, HeldFrames

MIB = 1 << 20


def test_handles_are_held_by_group_until_it_is_over():
    held = HeldFrames(FrameBudget())
    held.put("a", "a.0", "x", 3)
    held.put("a", "a.1", "y", 4)
    held.put("b", "b.0", "z", 5)
    assert held.of(["a", "c"]) == {"a.0": "x", "a.1": "y"} and held.bytes == 12
    held.forget(["a"], {"a.1", "b.0"})
    assert held.of(["a", "b"]) == {"a.0": "x", "b.0": "z"} and held.bytes == 8
    held.keep(lambda group: group == "b")
    assert held.of(["a", "b"]) == {"b.0": "z"} and held.bytes == 5


def test_of_what_may_be_learned_from_again_the_episodes_are_held_alone():
    held = HeldFrames(FrameBudget())
    for episode, size in (("a.0", 3), ("a.1", 4)):
        held.put("a", episode, f"frames of {episode}", size)
    held.keep(lambda group: False, {"a.1"})
    assert held.of(["a"]) == {"a.1": "frames of a.1"} and held.bytes == 4
    held.keep(lambda group: False, {"a.0"})
    assert held.of(["a"]) == {} and held.bytes == 0


def test_without_a_bound_there_is_always_room():
    held = HeldFrames(FrameBudget())
    held.put("a", "a.0", "x", 10**15)
    assert held.room(10**6)


def test_running_episodes_count_as_much_as_ended_ones_took():
    held = HeldFrames(FrameBudget(100 * MIB, first_guess=20 * MIB))
    assert held.room(5) and not held.room(6)
    held.put("a", "a.0", "x", 2 * MIB)
    assert held.room(49) and not held.room(50), "what was seen counts, not the guess"
    held.put("a", "a.1", "x", 4 * MIB)
    assert held.room(31) and not held.room(32)
