"""One record, one line of JSON, whatever it holds; libraries say little."""

from __future__ import annotations

import io
import json
import logging
import warnings
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapforge_operator.observability.logging import configure, ref


@pytest.fixture(autouse=True)
def _as_before():
    """Logging is the process' own: other tests find it as they left it."""
    root = logging.getLogger()
    named = [logging.getLogger(n) for n in ("kopf", "aiohttp", "asyncio", "opentelemetry")]
    before, levels, handlers = [logger.level for logger in named], root.level, root.handlers[:]
    yield
    logging.captureWarnings(False)
    root.handlers[:], _ = handlers, root.setLevel(levels)
    for logger, level in zip(named, before, strict=True):
        logger.setLevel(level)


def begun(level: str = "INFO", plain: bool = False) -> io.StringIO:
    stream = io.StringIO()
    configure(level, plain, stream)
    return stream


def lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


log = logging.getLogger("tapforge_operator.pool")
PHONES = ref("EmulatorPool", "default", "phones", "1-2")


def test_a_line_has_time_level_logger_message_and_object():
    stream = begun()
    log.warning("%d slots are sick", 3, extra=PHONES)
    (line,) = lines(stream)
    at = datetime.fromisoformat(line.pop("time"))
    assert at.utcoffset() is not None
    assert line == {
        "level": "WARNING",
        "logger": "tapforge_operator.pool",
        "message": "3 slots are sick",
        "object": {"kind": "EmulatorPool", "namespace": "default", "name": "phones", "uid": "1-2"},
    }


def test_a_record_about_nothing_has_no_object_and_what_is_unknown_is_left_out():
    stream = begun()
    log.info("began")
    log.info("gone", extra=ref("EmulatorPool", "default", "phones"))
    first, second = lines(stream)
    assert "object" not in first and "exception" not in first
    assert second["object"] == {"kind": "EmulatorPool", "namespace": "default", "name": "phones"}


def test_an_exception_stays_on_the_line_with_its_traceback():
    stream = begun()
    try:
        raise OSError("no\nroute")
    except OSError:
        log.exception("it broke", extra=PHONES)
    (line,) = lines(stream)
    assert line["message"] == "it broke"
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("OSError: no\nroute")


@given(message=st.text(), name=st.text(min_size=1))
def test_no_text_can_break_a_line(message, name):
    stream = begun()
    log.error("%s", message, extra=ref("Pod", "default", name))
    raw = stream.getvalue()
    assert raw.endswith("\n") and raw.count("\n") == 1 and raw.isascii()
    (line,) = lines(stream)
    assert (line["message"], line["object"]["name"]) == (message, name)


@pytest.mark.parametrize(
    ("level", "told"),
    [
        ("DEBUG", ["ours debug", "ours info", "kopf info", "kopf error"]),
        ("INFO", ["ours info", "kopf error"]),
        ("WARNING", ["kopf error"]),
        ("ERROR", ["kopf error"]),
    ],
)
def test_levels(level, told):
    stream = begun(level)
    log.debug("ours debug")
    log.info("ours info")
    logging.getLogger("kopf._core").info("kopf info")
    logging.getLogger("kopf._core").error("kopf error")
    assert [line["message"] for line in lines(stream)] == told


def test_plain_lines_for_a_person():
    stream = begun(plain=True)
    log.info("began", extra=PHONES)
    log.info("ended")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("Z INFO tapforge_operator.pool [EmulatorPool default/phones]: began")
    assert second.endswith("Z INFO tapforge_operator.pool: ended")


def test_warnings_are_records_too_and_configuring_twice_says_nothing_twice():
    begun()
    stream = begun()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", UserWarning, stacklevel=1)
    (line,) = lines(stream)
    assert line["logger"] == "py.warnings" and "UserWarning: old" in line["message"]
