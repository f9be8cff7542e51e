"""The proxy in front of a prefill and a decode server: a prompt goes to one, then to the other.

It knows nothing of KV. The prefill server answers when the prompt's KV is in the store; the decode
server finds it there by the prompt itself and pulls it when it has room, so a burst of prompts
cannot flood it. Whatever becomes of the prefill server, the decode server answers: what it does
not find it computes.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

log = logging.getLogger("proxy")

PREFILL_S = 600.0
"""Longest wait for a prefill; then the decode server computes the prompt."""


class Proxy:
    """`prefill` and `decode` are base URLs of vLLM's OpenAI-compatible servers."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self.application = web.Application(client_max_size=1 << 26)
        for path in ("/v1/completions", "/v1/chat/completions"):
            self.application.router.add_post(path, self._complete)
        self.application.router.add_get("/{path:.*}", self._forward)
        self.application.cleanup_ctx.append(self._connected)

    async def _connected(self, application: web.Application) -> Any:
        async with ClientSession(timeout=ClientTimeout(total=None)) as self._http:
            yield

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await self._compute_prompt(request.path, body)
        return await self._relay(request, body)

    async def _compute_prompt(self, path: str, body: dict[str, Any]) -> None:
        one = {**body, "max_tokens": 1, "n": 1, "stream": False}
        one.pop("stream_options", None)
        if "max_completion_tokens" in one:
            one["max_completion_tokens"] = 1
        limit = ClientTimeout(total=PREFILL_S)
        try:
            async with self._http.post(self._prefill + path, json=one, timeout=limit) as answer:
                await answer.read()
        except (ClientError, TimeoutError) as error:
            log.warning("the prefill server failed, the decode server goes on alone: %r", error)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        return await self._relay(request, None)

    async def _relay(self, request: web.Request, body: Any) -> web.StreamResponse:
        """The decode server's answer, piece by piece as it comes."""
        url = self._decode + request.path_qs
        async with self._http.request(request.method, url, json=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response
