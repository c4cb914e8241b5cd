"""Shadow checks of a server: a share of the answers is asked again for plain prefill, when the client has its answer.

The second request goes to vLLM's own application, past keys, plans and our counters. vLLM tells the token ids of an
answer only if its request asked for them, so texts are compared: the primary's tokenizer cuts both in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cacheclip_serve import InspectedAnswer, as_json
from starlette.types import ASGIApp, Message, Scope

from cacheclip_rag import FusionStats

from .planners import Planning
from .replies import ReplyText, Result
from .shadow import SHADOW_TOKENS, Shadow

_NOT_AGAIN = {"stream", "stream_options", "max_completion_tokens", "kv_transfer_params", "request_id"}
"""Fields of a request that its repetition has not, or has otherwise."""
_END = -1
"""In place of a token id: the answer ended by itself."""
_BEYOND = 64
"""Characters of an answer that are compared beyond the end of a shorter one."""


class ShadowChecks:
    """Asks again, for one answer at a time. What goes wrong is counted, and never raised."""

    def __init__(self, app: ASGIApp, planning: Planning, rate: float) -> None:
        """``app`` is vLLM's. ``planning`` has the tokenizer, and the metrics that count. ``rate``: share of the fused
        greedy answers, 0 to 1."""
        self.rate = rate
        self._app, self._planning = app, planning
        self._shadow = Shadow(rate, planning.metrics)
        self._running: asyncio.Task[None] | None = None
        self._default: float | None = None

    def offer(
        self,
        scope: Scope,
        body: Mapping[str, Any],
        result: Result,
        sent: bytes | bytearray,
        shown: InspectedAnswer | None = None,
    ) -> None:
        """Compare an answer if it is chosen, unless another one is being compared. Returns at once. ``scope``: of the
        client's request; ``body``: as it went to vLLM; ``sent``: vLLM's response, or the beginning of its stream;
        ``shown``: the answer on a page, which says what it differs in."""
        if not self.rate or result.stats is None or not result.stats.generated_tokens:
            return
        try:
            fields = {**body, "temperature": self._temperature(scope, body)}
            is_chosen = self._shadow.chooses(fields, result.outcome)
        except Exception as error:
            self._shadow.skip(error)
            return
        if is_chosen and self._running is not None and not self._running.done():
            self._planning.metrics.record_shadow_skipped()
        elif is_chosen:
            self._running = asyncio.create_task(self._check(scope, body, result.stats, sent, shown))

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _temperature(self, scope: Scope, body: Mapping[str, Any]) -> Any:
        """That of a request, or vLLM's of requests that state none."""
        if body.get("temperature") is not None:
            return body["temperature"]
        if self._default is None:  # it is read from files
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            sampling = {} if config is None else config.model_config.get_diff_sampling_param()
            self._default = sampling.get("temperature", 1.0)
        return self._default

    async def _check(
        self,
        scope: Scope,
        body: Mapping[str, Any],
        stats: FusionStats,
        sent: bytes | bytearray,
        shown: InspectedAnswer | None,
    ) -> None:
        try:
            again = _again(body, min(stats.generated_tokens, SHADOW_TOKENS))
            answer, plain = ReplyText.of(sent), ReplyText.of(await ask_itself(self._app, scope, again))
            # the plain answer is cut at a number of tokens, and the other one is cut where it was
            whole, other = answer.reasoning + answer.text, plain.reasoning + plain.text
            text = whole[: len(other) + _BEYOND * plain.has_ended]
            given, chosen = await self._planning.token_ids(text, other)
            given += (_END,) * (answer.has_ended and text == whole)
            chosen += (_END,) * plain.has_ended
            if given:
                self._shadow.record(given, chosen, method=stats.method)
                if shown is not None:
                    runtime = self._planning.planner(shown.question.tenant).primary
                    shown.compare(given, chosen, lambda ids: runtime.decode_ids([n for n in ids if n != _END]))
            else:  # vLLM holds back half a character
                self._shadow.skip("there is no text to compare")
        except Exception as error:
            self._shadow.skip(error)


async def ask_itself(app: ASGIApp, scope: Scope, body: Mapping[str, Any]) -> bytes:
    """vLLM's response to a request of this server itself. Raises RuntimeError: it is an error."""
    content = as_json(body)
    request: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, found = 0, bytearray()

    async def receive() -> Message:
        if not request:
            await asyncio.Event().wait()  # this client never leaves
        return request.pop()

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        found.extend(message.get("body", b""))

    headers = [(name, value) for name, value in scope["headers"] if name.lower() in (b"host", b"authorization")]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await app({**scope, "headers": headers}, receive, send)
    if status != 200:
        raise RuntimeError(f"vLLM answered with status {status}")
    return bytes(found)


def _again(body: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """The request for plain prefill of the same tokens, with the same sampling and the same salt."""
    again = {name: value for name, value in body.items() if name not in _NOT_AGAIN} | {"max_tokens": max_tokens}
    if body.get("min_tokens"):
        again["min_tokens"] = min(body["min_tokens"], max_tokens)
    ids = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if ids is not None:  # of a chat; vLLM takes them out, and the connector sees no parameters
        again["kv_transfer_params"] = {"prompt_token_ids": ids}
    return again
