"""The base that comes with the package really looks: on layouts and sentences that it was never trained on."""

from tapforge_envs.phone import catalog
from tapforge_envs.protocol import Tap
from tapforge_trainer.model_source.tiny_base import SHIPPED
from tapforge_trainer.tiny.grounding import Example
from tapforge_trainer.tiny.scoring import Scorer


def test_it_finds_the_first_thing_to_tap_on_held_out_screens():
    """The first action of tasks of the test split: a home screen with six icons in an arrangement that training never
    shows. Chance is one in six."""
    tasks = catalog.tasks("quickstart", "test")
    shown = []
    for number in range(160):
        task = tasks.sample(11, number)
        phone = catalog.phone_for("quickstart", 96, 160)
        phone.reset(task.seed, catalog.rules_of(task))
        first = next(iter(catalog.template_of(task).plan(task.params, lambda: False))).resolve(phone)
        assert isinstance(first, Tap)
        shown.append(Example(phone.screen(), task.goal, (), first))
    assert Scorer.of_folder(SHIPPED).accuracy(shown) > 0.97
