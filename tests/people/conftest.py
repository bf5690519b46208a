"""The browser of the phone page's tests, the phones of the tests of slots, and the bridge's command serve here too."""

import io
import sys
from pathlib import Path

import pytest
from PIL import Image

_TESTS = Path(__file__).parent.parent
sys.path += [str(_TESTS / name) for name in ("phone", "slots", "bridge")]


@pytest.fixture
def png() -> bytes:
    """A picture of one pixel."""
    out = io.BytesIO()
    Image.new("RGB", (1, 1)).save(out, "PNG")
    return out.getvalue()
