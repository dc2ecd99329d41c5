"""The door of an engine server: an ASGI middleware that answers nobody who lacks the run's key, on any route.

Enters: every request, the weight-update and development routes included, which the server itself leaves open. Leaves: 401 without the
key, the server's own answer with it. The key comes from an environment variable, never from the command line, and is compared in constant
time over its hash. Without a key in the environment the server does not start.
"""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "JETRL_ENGINE_KEY"
MIN_KEY_CHARS = 32
_Message = MutableMapping[str, Any]


class RequireKey:
    """Middleware that vLLM loads by name (`--middleware jetrl_megatron.rollout.vllm_auth.RequireKey`).

    app: the ASGI application behind it. Raises ValueError where the environment holds no key; see `key_of_environment`.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        """Read the key from the environment."""
        self._app = app
        self._digest = _digest(b"Bearer " + key_of_environment().encode())

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Pass an authorised request on; answer 401 (or close a web socket) otherwise."""
        if scope["type"] == "lifespan" or self._authorised(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]})
            await send({"type": "http.response.body", "body": b'{"error": "a key is needed"}'})

    def _authorised(self, scope: _Message) -> bool:
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(_digest(values[0]), self._digest)


def key_of_environment() -> str:
    """Return the key that servers and run were given.

    Raises ValueError where it is shorter than 32 characters, or has one that no HTTP header takes; the message does not show the key.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < MIN_KEY_CHARS:
        raise ValueError(f"{KEY_VARIABLE} holds {len(key)} characters; an engine server needs a key of at least {MIN_KEY_CHARS}")
    if not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{KEY_VARIABLE} holds a space, a line break or a character beyond ASCII; a key has none: remove it")
    return key


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
