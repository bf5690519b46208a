"""What a plan says of a history in blocks: which chat templates and prompt files keep steps from extending each other,
with the published vocabularies and templates of each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.families import real

from tapforge_api import TrainingRun, load
from tapforge_trainer.run.feasibility import judge
from tapforge_trainer.run.local_files import LocalFiles
from tapforge_trainer.run.model_facts import facts_of
from tapforge_trainer.run.plan import plan, render

HEAD = "apiVersion: tapforge.dev/v1alpha1\nkind: TrainingRun\nmetadata: {name: x}\n"
BLOCKS = ("model.adapter.history={blocks: {keep: 2, upTo: 4}}", "model.contextTokens=10240", "model.maxPixels=1000000")
JOINED = "a sequence for up to 4 steps, each with its own advantage"


def run(folder: Path, adapter: str, *overrides: str) -> TrainingRun:
    model = f"model.source={{path: {{folder: {json.dumps(str(folder))}}}}}"
    return load(HEAD, [model, f"model.adapter.name={adapter}", *(overrides or BLOCKS)])


def notes(run: TrainingRun) -> tuple[str, ...]:
    facts = facts_of(run)
    assert facts is not None
    found = judge(run, facts)
    assert found.errors == ()
    return found.notes


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("qwen2-vl-7b-tiny", "aguvis"),
        ("qwen2.5-vl-7b-tiny", "qwen2.5-vl"),
        ("qwen2.5-vl-7b-tiny", "ui-tars"),
        ("qwen3-vl-8b-tiny", "qwen3-vl"),
        ("qwen3-vl-8b-tiny", "mai-ui"),
        ("qwen3-vl-8b-tiny", "gui-owl-computer"),
        ("qwen3-vl-30b-a3b-tiny", "qwen3-vl"),
    ],
)
def test_published_templates_let_steps_extend_each_other(name: str, adapter: str) -> None:
    wanted = run(real.folder(name), adapter)
    assert notes(wanted) == ()
    assert JOINED in render(plan(wanted, LocalFiles(model=facts_of(wanted))))


@pytest.mark.parametrize(
    ("opening", "words"),
    [
        ("<think>\\n", "opens a thought (<think>) in each answer"),
        ("<think>\\n\\n</think>\\n\\n", "writes a turn otherwise when it is an earlier one"),
    ],
)
def test_a_template_that_leaves_out_what_it_opened_is_named(tmp_path: Path, opening: str, words: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(real.folder("qwen3-vl-8b-tiny"), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = (folder / "chat_template.jinja").read_text()
    thinking = template.replace("assistant\\n' }}\n{%- endif %}", f"assistant\\n{opening}' }}}}\n{{%- endif %}}")
    assert thinking != template
    (folder / "chat_template.jinja").write_text(thinking)
    wanted = run(folder, "qwen3-vl")
    (note,) = notes(wanted)
    assert words in note and str(folder / "chat_template.jinja") in note
    assert JOINED not in render(plan(wanted, LocalFiles(model=facts_of(wanted))))
    assert notes(run(folder, "qwen3-vl", "model.contextTokens=10240")) == ()  # a window that slides
    turns = run(folder, "qwen3-vl", *BLOCKS, "model.adapter.prompt=turns")
    assert notes(turns) == (), "a prompt that is written without the template"
    assert JOINED in render(plan(turns, LocalFiles(model=facts_of(turns))))


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("{{ goal }} of {{ app }}, step {{ step }}", "names step and app"),
        ("{{ goal }}{% for one in history %}{{ one.text }}{% endfor %}", "names history"),
        ("{{ goal }}{% for one in steps %}{{ one.text }}{% endfor %}", ""),
    ],
)
def test_a_prompt_file_that_changes_at_each_step_is_named(tmp_path: Path, said: str, named: str) -> None:
    (tmp_path / "prompt.jinja").write_text(said)
    own = f"model.adapter.promptFile={tmp_path / 'prompt.jinja'}"
    found = notes(run(real.folder("qwen3-vl-8b-tiny"), "qwen3-vl", *BLOCKS, own))
    assert len(found) == bool(named) and all(named in note for note in found)


def test_a_context_is_named_without_being_called() -> None:
    note, *others = notes(run(real.folder("qwen3-vl-8b-tiny"), "qwen3-vl", *BLOCKS, "model.adapter.context=hints"))
    assert "what the context hints adds is in the first message" in note and not others
