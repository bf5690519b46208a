"""What a server of `spec.models` answers without its token: whether it is well, and nothing else.

vLLM itself asks for the token under a few prefixes alone (`/v1` and others): `/invocations`, which answers as
`/v1/chat/completions` does, `/tokenize` and more are open. This is ASGI middleware, which vLLM's server takes by name.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

#: of the environment: where vLLM finds the token, too
TOKEN: Final = "VLLM_API_KEY"
_OPEN: Final = "/health"


class TokenGate:
    def __init__(self, app: App):
        """Raises KeyError where the environment has no token."""
        self._app, self._wanted = app, f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] == _OPEN) or self._known(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _known(self, scope: Message) -> bool:
        said = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        return len(said) == 1 and secrets.compare_digest(said[0], self._wanted)
