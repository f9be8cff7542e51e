"""A small HTTP port: GET /metrics (Prometheus) and GET /health (JSON; 503 unless "ok").

One request per connection, without a body, within a deadline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from kvpool.store.metrics import exposition

log = logging.getLogger("kvpool")

DEADLINE_S = 5.0
HEADER_BYTES_MAX = 8192
CONNECTIONS_MAX = 64
STATUS_AGE_S_MAX = 0.5
"""Figures cost time in proportion to what is stored, so a flood of questions shares them."""

Answer = tuple[HTTPStatus, str, bytes]


class HttpPort:
    """Answers HTTP connections. `state()` is (state, reasons), `status()` all figures, and
    `allows(token)` whether a bearer token may read the metrics and reasons."""

    def __init__(
        self,
        *,
        state: Callable[[], tuple[str, list[str]]],
        status: Callable[[], Mapping[str, Any]],
        allows: Callable[[str], bool],
    ) -> None:
        self._state = state
        self._status = status
        self._allows = allows
        self.connections = 0
        self._metrics = b""
        self._metrics_at = float("-inf")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The callback of `asyncio.start_server`."""
        self.connections += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await self._answer(reader)
                writer.write(_response(*answer))
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # a client that is slow, or gone: nobody to tell
        except Exception:
            log.exception("an HTTP request failed")
        finally:
            self.connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the header is too large")
        # Not before: closing with the request unread would reset the connection.
        if self.connections > CONNECTIONS_MAX:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST, "this is no HTTP/1 request")
        if words[0] not in ("GET", "HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
        status, kind, body = self._page(words[1].partition("?")[0], _bearer(lines[1:]))
        return status, kind, b"" if words[0] == "HEAD" else body

    def _page(self, path: str, token: str) -> Answer:
        if path == "/health":
            return self._health(self._allows(token))
        if path != "/metrics":
            return _plain(HTTPStatus.NOT_FOUND, "there are /metrics and /health")
        if not self._allows(token):
            return _plain(HTTPStatus.UNAUTHORIZED, "send the [http] token as a bearer token")
        if self._state()[0] == "starting":  # the self-test would be counted, and then forgotten
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "the daemon is starting")
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._exposition()

    def _health(self, allowed: bool) -> Answer:
        state, reasons = self._state()
        body: dict[str, Any] = {"status": state}
        if allowed:  # the figures in them are not for everybody
            body["reasons"] = reasons
        code = HTTPStatus.OK if state == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return code, "application/json", json.dumps(body).encode()

    def _exposition(self) -> bytes:
        now = time.monotonic()
        if now - self._metrics_at > STATUS_AGE_S_MAX:
            self._metrics = exposition(self._status)
            self._metrics_at = now
        return self._metrics


def _bearer(headers: list[str]) -> str:
    for header in headers:
        name, _, value = header.partition(":")
        scheme, _, token = value.strip().partition(" ")
        if name.lower() == "authorization" and scheme.lower() == "bearer":
            return token.strip()
    return ""


def _plain(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(["Allow: GET, HEAD"] if status is HTTPStatus.METHOD_NOT_ALLOWED else []),
        *(["WWW-Authenticate: Bearer"] if status is HTTPStatus.UNAUTHORIZED else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
