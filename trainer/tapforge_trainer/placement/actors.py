"""What a failed call of a Ray actor says in one line. The whole remote traceback stays in the exception's cause."""

from __future__ import annotations

#: characters
_LONGEST = 600


def reason(error: BaseException) -> str:
    """Type and last line of the error that the remote function raised."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    name = type(cause).__name__
    return (text if text.startswith(f"{name}:") else f"{name}: {text}")[:_LONGEST]
