"""Where the page may listen, and by which names it may be called."""

from __future__ import annotations

from ..serving.http import EVERYWHERE
from ..serving.same_site import LOOPBACK


def names_of(host: str) -> list[str] | None:
    """Hosts by which a page at `host` may be called; None: any, which needs a token."""
    return None if host in EVERYWHERE else [host]


def refusal_to_show(host: str, token: str) -> str:
    """Why the page may not be served there; "" when it is fine."""
    if host in LOOPBACK or token:
        return ""
    return (
        f"on {host!r} others reach the page, which acts on phones: give it a token (TAPFORGE_TOKEN), serve no page "
        "(--page off), or serve on 127.0.0.1 and forward the port with ssh -L"
    )
