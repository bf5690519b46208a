"""Which goals are the same."""

import pytest

from tapforge_trainer.generation.alike import Goals, mean_the_same, meaning


@pytest.mark.parametrize(
    "one, other",
    [
        ("Turn on Wi-Fi in Settings.", "turn on wifi in settings"),
        ("Turn on Wi-Fi in Settings.", "Please switch Wi-Fi on in the settings"),
        ("Turn on Wi-Fi in Settings.", "Enable wifi in the Settings app"),
        ("Delete the note Trip in Notes", "Remove the note Trip from the Notes app"),
        ("Mark the photo Boat as favorite", "Star the photo Boat"),
        ("Add Pay rent to the list Home in Todo", "In Todo, add Pay rent to the Home list"),
    ],
)
def test_the_same_in_other_words(one, other):
    assert mean_the_same(meaning(one), meaning(other))


@pytest.mark.parametrize(
    "one, other",
    [
        ("Turn on Wi-Fi in Settings.", "Turn off Wi-Fi in Settings."),
        ("Set an alarm for 7:30", "Set an alarm for 8:30"),
        ("Turn on wifi in camera", "Turn on wifi in clock"),
        ("Open Mail then Clock", "Open Clock then Mail"),
        ('Write "eggs" into the note Trip', 'Write "milk" into the note Trip'),
        ("Add 2 in shop", "Add 3 in shop"),
        (
            "Turn the do not disturb mode on and open the album Trip in Photos, Clock, Notes, Mail and Maps",
            "Turn the do not disturb mode off and open the album Trip in Photos, Clock, Notes, Mail and Maps",
        ),
        (
            "Open the album Trip in Photos and let the list Home show done items of Anna and Ben",
            "Open the album Trip in Photos and don\u2019t let the list Home show done items of Anna and Ben",
        ),
        ("Like the song Night Train in Music.", "Like the song Slow River in Music."),
    ],
)
def test_what_asks_for_something_else(one, other):
    assert not mean_the_same(meaning(one), meaning(other))


def test_it_says_by_what_and_where():
    goals = Goals([("Turn on Wi-Fi.", "eval.jsonl")])
    assert goals.same("turn ON wi-fi") == ("words", "eval.jsonl")
    assert goals.same("enable the wifi") == ("meaning", "eval.jsonl")
    assert goals.same("turn off wifi") is None
