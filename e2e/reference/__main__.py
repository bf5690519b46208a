"""`make reference`: writes docs/reference again, from the code: fields, commands, figures, events, summary, protocol.

    python -m e2e.reference

tests/api/test_generated.py compares the files with what this would write.
"""

from __future__ import annotations

from .files import FOLDER, files

if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}")
