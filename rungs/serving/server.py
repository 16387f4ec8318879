"""The process that listens, from start to the last answer."""

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rungs.common.errors import UserError, reason
from rungs.serving.app import App
from rungs.serving.engine import Engine

_SECONDS_FOR_HEADERS = 10
_SECONDS_UNREAD = 60
"""How long a client may read nothing of what waits for it."""
_SECONDS_BETWEEN_REQUESTS = 5
_MOST_HEADER_BYTES = 1 << 14
_MOST_CONNECTIONS = 512
_BACKLOG = 128
"""New connections that wait to be accepted, which happens to all of them at once."""


class _Protocol(H11Protocol):
    """Closes connections whose headers don't arrive in time, or whose answers nobody reads, both of
    which uvicorn waits for; ends the answer to a request whose body turns out to be malformed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(_SECONDS_FOR_HEADERS, self._close_unused)
        self._unread: asyncio.TimerHandle | None = None

    def on_response_complete(self) -> None:
        self._timer.cancel()
        self._timer = self.loop.call_later(_SECONDS_FOR_HEADERS, self._close_unused)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_SECONDS_UNREAD, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread:
            self._unread.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def _close_unused(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class _Server(uvicorn.Server):
    """Ends when the engine has failed."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def on_tick(self, counter: int) -> bool:
        return not self._engine.is_alive() or await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises UserError if it can't."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:  # of a name that DNS can't have
        why = getattr(error, "strerror", None) or reason(error)
        raise UserError(f"--host {host} --port {port}: {why}; choose another") from None


def make_server(app: App, engine: Engine) -> uvicorn.Server:
    """Return the server of some routes; its `serve` listens until `should_exit` or a signal."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # else a line per hostile request
    config = uvicorn.Config(
        app.asgi,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        backlog=_BACKLOG,
        timeout_keep_alive=_SECONDS_BETWEEN_REQUESTS,
        timeout_graceful_shutdown=int(app.limits.answer_seconds),
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        server_header=False,
    )
    return _Server(config, engine)


def answer_until_signal(app: App, engine: Engine, listener: socket.socket) -> None:
    """Answer until SIGTERM or SIGINT, then finish what has begun. Raises what ended the engine, if
    it has failed."""
    engine.start()
    try:
        asyncio.run(make_server(app, engine).serve([listener]))
    finally:
        engine.end()
    if engine.error is not None:
        raise engine.error
