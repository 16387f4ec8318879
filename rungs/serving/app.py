"""The server: its routes, limits and keys, from start to the last answer."""

import asyncio
import functools
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pydantic
import uvicorn
from starlette import status
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rungs.common.errors import UserError, did_you_mean, reason
from rungs.serving.answering import Answer, FailedError, event_lines
from rungs.serving.engine import Engine, QueueFullError
from rungs.serving.protocol import Body, ChatBody, CompletionBody, error_json, problems
from rungs.serving.served import Served

PAGE = Path(__file__).with_name("chat.html")
_SECONDS_BETWEEN_REQUESTS = 5
_SECONDS_BETWEEN_LOOKS = 0.5
"""How often to look whether the client is still there."""
_MOST_CONNECTIONS = 512
_BACKLOG = 128
"""New connections that wait to be accepted, which happens to all of them at once."""


class Limits(NamedTuple):
    """What one client may take."""

    body_bytes: int = 1 << 20
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
        handlers: dict[Any, Any] = {
            Refusal: lambda _, it: failure(it.status_code, it.detail, it.code, it.headers),
            HTTPException: lambda _, it: failure(it.status_code, it.detail),
            ClientDisconnect: lambda *_: Response(),
        }
        every = Starlette(routes=routes, exception_handlers=handlers)
        self.asgi = _only_for(hosts, every) if hosts else every

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
                raise Refusal(status.HTTP_401_UNAUTHORIZED, hint, "invalid_api_key")
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
        self._find(name)
        return JSONResponse(self._described(name))

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

    def _find(self, name: str) -> Served:
        """Return a model. Raises Refusal."""
        if name not in self._models:
            hint = did_you_mean(name, self._models, f"this server has {', '.join(self._models)}")
            text = f"model: no {name!r}; {hint}"
            raise Refusal(status.HTTP_404_NOT_FOUND, text, "model_not_found")
        return self._models[name]

    async def _answer(self, request: Request, kind: type[Body]) -> Response:
        answer = await self._begun(request, kind)
        if answer.is_streamed:
            headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            lines = self._lines(answer)
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)
        whole = asyncio.create_task(answer.whole())
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                while not (await asyncio.wait([whole], timeout=_SECONDS_BETWEEN_LOOKS))[0]:
                    if await request.is_disconnected():
                        return Response()
            return JSONResponse(whole.result())
        except (TimeoutError, FailedError) as error:
            return failure(*self._problem(error))
        finally:
            whole.cancel()

    async def _begun(self, request: Request, kind: type[Body]) -> Answer:
        """Return what the engine has begun. Raises Refusal."""
        try:
            body = kind.model_validate(json.loads(await self._read(request)))
            model = self._find(body.model)
            prompts = await asyncio.to_thread(model.prompts, body)
            self._check(model, body, prompts)
            grammar = await asyncio.to_thread(model.grammar, body)
            answer = Answer(model, body, prompts, grammar)
            self._engine.submit(body.model, answer.texts)
        except pydantic.ValidationError as error:
            raise Refusal(status.HTTP_400_BAD_REQUEST, problems(error)) from None
        except RecursionError:
            raise Refusal(status.HTTP_400_BAD_REQUEST, "it is nested too deeply") from None
        except ValueError as error:
            raise Refusal(status.HTTP_400_BAD_REQUEST, reason(error)) from None
        except QueueFullError:
            busy, headers = "too many requests wait; try again", {"Retry-After": "1"}
            raise Refusal(status.HTTP_429_TOO_MANY_REQUESTS, busy, headers=headers) from None
        return answer

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

    async def _lines(self, answer: Answer) -> AsyncIterator[str]:
        """Yield the events of a streamed answer."""
        try:
            async with asyncio.timeout(self.limits.answer_seconds):
                async for event in answer.events():
                    yield event_lines(event)
            yield "data: [DONE]\n\n"
        except (TimeoutError, FailedError) as error:
            yield event_lines(error_json(self._problem(error)[1], "server_error"))


class Refusal(HTTPException):
    """A request that is not answered, and why."""

    def __init__(
        self,
        http_status: int,
        message: str,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(http_status, message, headers)
        self.code = code


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


def _only_for(hosts: list[str], app: ASGIApp) -> ASGIApp:
    """Return an app that refuses other names, by which a page of another site could reach this
    machine (DNS rebinding)."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        host, answer = Headers(scope=scope).get("Host", ""), app
        if re.sub(r":\d*$", "", host).lower() not in hosts:
            hint = f"call it {hosts[0]}, or start the server with --key-file FILE for any name"
            answer = failure(status.HTTP_400_BAD_REQUEST, f"Host: {host[:100]!r}; {hint}")
        await answer(scope, receive, send)

    return checked


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
