"""The server: its routes, limits and keys, from start to the last answer."""

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import uvicorn
from starlette import status
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rungs.common.errors import UserError, did_you_mean, reason
from rungs.serving.answering import Answer, ClientGoneError, FailedError, event_lines
from rungs.serving.engine import Engine, QueueFullError
from rungs.serving.protocol import Body, ChatBody, CompletionBody, error_json, problems
from rungs.serving.served import Served

PAGE = Path(__file__).with_name("chat.html")
_SECONDS_BETWEEN_REQUESTS = 5
_MOST_CONNECTIONS = 512
_BACKLOG = 128
"""New connections that wait to be accepted, which happens to all of them at once."""


class Limits(NamedTuple):
    """What one client may take."""

    body_bytes: int = 1 << 20
    body_seconds: float = 10.0
    """How long the body of a request may take to arrive."""
    answer_seconds: float = 300.0
    """How long the whole answer may take."""
    new_tokens: int | None = None
    """Most new tokens of a text; None: what fits the context."""
    texts: int = 16
    """Most texts of a request: prompts times n."""


class App:
    """The routes for some models.

    Args:
        key: clients must send it; None for none.
        hosts: names by which browsers on this machine may call it; None for any."""

    def __init__(
        self,
        models: Mapping[str, Served],
        engine: Engine,
        limits: Limits,
        key: str | None,
        hosts: list[str] | None,
    ) -> None:
        self._models, self._engine = models, engine
        self.limits, self._key = limits, key
        self._made_at = int(time.time())
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/v1/models", self._keyed(self._list_models)),
            Route("/v1/models/{name:path}", self._keyed(self._show_model)),
        ]
        for path, kind in (("completions", CompletionBody), ("chat/completions", ChatBody)):
            endpoint = self._keyed(functools.partial(self._answer, kind=kind))
            routes.append(Route(f"/v1/{path}", endpoint, methods=["POST"]))
        trusted = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)] if hosts else []
        handlers = {HTTPException: self._http_error, ClientDisconnect: self._gone}
        self.asgi = Starlette(routes=routes, middleware=trusted, exception_handlers=handlers)  # type: ignore[arg-type]

    def _keyed(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a route that needs the key."""

        async def checked(request: Request) -> Response:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            own = (self._key or "").encode()
            is_right = hmac.compare_digest(given.strip().encode(), own)
            if own and not (is_right and scheme.lower() == "bearer"):
                hint = "send the server's key: Authorization: Bearer KEY"
                return failure(status.HTTP_401_UNAUTHORIZED, hint, "invalid_api_key")
            return await answer(request)

        return checked

    async def _page(self, _: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": f"{policy}; connect-src 'self'; img-src data:"}
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=headers)

    async def _health(self, _: Request) -> Response:
        if self._engine.is_alive():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed"}, status.HTTP_503_SERVICE_UNAVAILABLE)

    async def _list_models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*map(self._described, self._models)]})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._described(name)) if name in self._models else self._no_model(name)

    def _described(self, name: str) -> dict[str, Any]:
        model = self._models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._made_at,
            "owned_by": "rungs",
            "max_model_len": model.context_length,
            "has_chat_template": model.form is not None,
            "weights": model.step,
        }

    def _no_model(self, name: str) -> Response:
        known = ", ".join(self._models)
        hint = did_you_mean(name, self._models, f"this server has {known}")
        return failure(status.HTTP_404_NOT_FOUND, f"model: no {name!r}; {hint}", "model_not_found")

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        answer = await self._begun(request, kind)
        if isinstance(answer, Response):  # it was refused
            return answer
        if answer.is_streamed:
            return _Stream(answer, self._lines(request, answer))
        return await self._whole(request, answer)

    async def _begun(self, request: Request, kind: type[Body]) -> Answer | Response:
        """Return what the engine has begun, or why it hasn't."""
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                content = await self._read(request)
            body = kind.model_validate(json.loads(content))
            if body.model not in self._models:
                return self._no_model(body.model)
            model = self._models[body.model]
            prompts = await asyncio.to_thread(model.prompts, body)
            self._check(model, body, prompts)
            answer = Answer(model, body, prompts)
            self._engine.submit(body.model, answer.texts)
        except TimeoutError:
            return failure(status.HTTP_408_REQUEST_TIMEOUT, "the request took too long to arrive")
        except pydantic.ValidationError as error:
            return failure(status.HTTP_400_BAD_REQUEST, problems(error))
        except RecursionError:
            return failure(status.HTTP_400_BAD_REQUEST, "the request is nested too deeply")
        except ValueError as error:
            return failure(status.HTTP_400_BAD_REQUEST, reason(error))
        except QueueFullError:
            busy = "too many requests wait; try again"
            return failure(status.HTTP_429_TOO_MANY_REQUESTS, busy, headers={"Retry-After": "1"})
        return answer

    async def _whole(self, request: Request, answer: Answer) -> Response:
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                return JSONResponse(await answer.whole(request.is_disconnected))
        except ClientGoneError:
            return Response()
        except (TimeoutError, FailedError) as error:
            return failure(*self._problem(error))

    def _problem(self, error: TimeoutError | FailedError) -> tuple[int, str]:
        """Return the status and message of an answer that failed."""
        if isinstance(error, FailedError):
            return status.HTTP_500_INTERNAL_SERVER_ERROR, str(error)
        slow = f"the answer took more than {self.limits.answer_seconds:.0f} seconds"
        return status.HTTP_504_GATEWAY_TIMEOUT, slow

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raises ValueError if it is too large or no JSON is announced."""
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which other sites can't send without asking
            raise UserError("Content-Type must be application/json")
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > self.limits.body_bytes:
                raise UserError(f"the request is larger than {self.limits.body_bytes:,} bytes")
        return bytes(content)

    def _check(self, model: Served, body: Body, prompts: list[list[int]]) -> None:
        """Raise UserError if a request asks for too much."""
        if len(prompts) * body.n > self.limits.texts:
            raise UserError(
                f"n: {len(prompts)} prompts × {body.n} are more than {self.limits.texts} texts"
            )
        most = max(model.new_tokens(body, prompt) for prompt in prompts)
        if self.limits.new_tokens is not None and most > self.limits.new_tokens:
            raise UserError(f"max_tokens: {most} is more than {self.limits.new_tokens}")

    async def _lines(self, request: Request, answer: Answer) -> AsyncIterator[str]:
        """Yield the events of a streamed answer."""
        with contextlib.suppress(ClientGoneError):
            try:
                async with asyncio.timeout(self.limits.answer_seconds):
                    async for event in answer.events(request.is_disconnected):
                        yield event_lines(event)
                yield "data: [DONE]\n\n"
            except (TimeoutError, FailedError) as error:
                yield event_lines(error_json(self._problem(error)[1], "server_error"))

    async def _http_error(self, _: Request, error: HTTPException) -> Response:
        return failure(error.status_code, error.detail)

    async def _gone(self, _: Request, __: ClientDisconnect) -> Response:
        return Response()


class _Stream(StreamingResponse):
    """The events of an answer, which nobody waits for once they end, or if they never began."""

    def __init__(self, answer: Answer, lines: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.forget()


def failure(
    http_status: int,
    message: str,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response that says what is wrong."""
    is_ours = http_status >= status.HTTP_500_INTERNAL_SERVER_ERROR
    kind = "server_error" if is_ours else "invalid_request_error"
    return JSONResponse(error_json(message, kind, code), http_status, headers)


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
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        limit_concurrency=_MOST_CONNECTIONS,
        backlog=_BACKLOG,
        timeout_keep_alive=_SECONDS_BETWEEN_REQUESTS,
        timeout_graceful_shutdown=int(app.limits.answer_seconds),
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
