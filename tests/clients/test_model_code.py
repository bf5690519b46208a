"""Reading a model's code prints nothing, and leaves the warnings of everything else as they are."""

import subprocess
import sys
import warnings

import pytest

from tapforge_envs.clients import model_code

WARNED = [r"pyautogui.write('\d')", "pyautogui.click(1if 2else 3)", "pyautogui.click(0x1for x in y)"]


@pytest.mark.parametrize("text", WARNED)
def test_what_python_would_warn_of_is_read_in_silence(text: str) -> None:
    """Also where warnings are errors: then such code would be no code."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model_code.statements(text)
        model_code.expression(text)
    assert not heard
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model_code.statements(text)


def test_a_users_log_holds_nothing_of_it() -> None:
    """By both that read programs of models, in a process with the interpreter's own filters and all warnings on."""
    program = f"""
import warnings
from tapforge_envs.clients.pyautogui_text import Scale, actions_of
from tapforge_trainer.agents.aguvis import DIALECT
from tapforge_trainer.agents.coordinates import Plane
before = len(warnings.filters)
for text in {WARNED!r}:
    for read in (lambda: actions_of(text, Scale((100, 100))), lambda: DIALECT.parse(text.replace("pyautogui.write",
                 "mobile.open_app"), Plane(DIALECT.coordinates, 100, 100))):
        try:
            read()
        except ValueError:
            pass
assert len(warnings.filters) == before + 1
compile(r"'\\d'", "ours", "eval")
"""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "Warning" in line] == [
        "ours:1: DeprecationWarning: invalid escape sequence '\\d'"
    ]


@pytest.mark.parametrize("text", ["f(", "\0", "(" * 1000, "-" * 100_000])
def test_what_is_no_code_is_a_value_error(text: str) -> None:
    for read in (model_code.statements, model_code.expression):
        with pytest.raises(ValueError, match="^is not an? (program|expression): "):
            read(text)
