"""What the middleware finds behind it: an application with the paths and responses of vLLM's server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import takewhile
from operator import eq
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from cacheclip_rag.planning import FusionPlan

WORDS = ["The", " year", " was", " 1904."]
METRICS = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n"


class Inner:
    """Answers every prompt with the same words, and remembers what came."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.told: dict[str, Any] = {"outcome": "fused", "reason": None}
        """What the connector says of a plan."""
        self.cached: int | None = None
        """Cached tokens; None: those whose KV a plan makes, else none."""
        self.gate = threading.Event()
        """Streams wait for it after their first word."""
        self.gate.set()
        self.calls: list[dict[str, Any]] = []
        """Pieces of calls, each of which is a chunk of a chat's stream after its words."""
        self.error: Response | None = None
        self.plain: tuple[list[str], str] = (WORDS, "stop")
        """What prompts without a plan are answered, and why these answers end."""
        self.plain_gate = threading.Event()
        """They wait for it."""
        self.plain_gate.set()
        self.plain_error: Response | None = None
        self.held: list[list[int]] = []
        """Token ids of completions without a plan, whose KV is in the prefix cache in blocks of 16."""
        paths = [("/v1/chat/completions", self._chat), ("/v1/completions", self._completion)]
        paths += [("/v1/responses", self._response), ("/v1/messages", self._message)]
        others = ["/tokenize", "/reset_prefix_cache", "/health", "/metrics", "/v1/models"]
        routes = [Route(path, handle, methods=["POST"]) for path, handle in paths]
        self.app = Starlette(routes=routes + [Route(path, self._other, methods=["GET", "POST"]) for path in others])

    @property
    def last(self) -> dict[str, Any]:
        return self.bodies[-1]

    async def _other(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        if request.url.path == "/metrics":
            assert "gzip" not in request.headers.get("accept-encoding", "")
            return PlainTextResponse(METRICS)
        if request.url.path == "/v1/models":
            card = {"object": "model", "root": "/models/tiny", "max_model_len": 4096}
            cards = [{"id": name, **card} for name in ("tiny", "an-adapter")]
            return JSONResponse({"object": "list", "data": cards})
        return JSONResponse({"path": request.url.path})

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, "chat.completion")

    async def _completion(self, request: Request) -> Response:
        return await self._answer(request, "text_completion")

    async def _response(self, request: Request) -> Response:
        return _in_other_words(await self._answer(request, "response"), _as_response)

    async def _message(self, request: Request) -> Response:
        return _in_other_words(await self._answer(request, "message"), _as_message)

    async def _answer(self, request: Request, kind: str) -> Response:
        body = json.loads(await request.body())
        assert request.headers["content-length"] == str(len(await request.body()))
        self.bodies.append(body)
        if self.error is not None:
            return self.error
        carried = body.get("kv_transfer_params") or {}
        plan = carried.get("cacheclip", {}).get("plan")
        words, finish = (WORDS, "stop") if plan else self.plain
        while not (plan or self.plain_gate.is_set()):
            await asyncio.sleep(0.01)
        if not plan and self.plain_error is not None:
            return self.plain_error
        prompt = len(plan["token_ids"]) if plan else 40
        ready = FusionPlan.from_dict(plan).num_ready if plan else 0
        if not plan and isinstance(body.get("prompt"), list):
            prompt = len(body["prompt"])
            known = [sum(1 for _ in takewhile(bool, map(eq, ids, body["prompt"][:-1]))) for ids in self.held]
            ready = max(known, default=0) // 16 * 16
            self.held.append(body["prompt"])
        cached = ready if self.cached is None else self.cached
        usage = {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        head = {"id": "x-1", "created": 7, "model": "tiny"}
        metrics = {"time_to_first_token_ms": 5.0}
        if body.get("stream"):
            events = self._events(body, {**head, "object": f"{kind}.chunk"}, usage, metrics)
            return StreamingResponse(events, 200, None, "text/event-stream")
        said: dict[str, Any] = {"text": "".join(words)}
        if kind != "text_completion":
            said = {"message": {"role": "assistant", "content": "".join(words), "tool_calls": []}}
        ids = {"token_ids": [len(word) for word in words]} if body.get("return_token_ids") else {}
        told = {"cacheclip": self.told, "other": 1} if plan else None
        choices = [{"index": 0, **said, "finish_reason": finish, **ids}]
        counted = {"usage": usage, "kv_transfer_params": told, "metrics": metrics}
        return JSONResponse({**head, "object": kind, "choices": choices, **counted})

    async def _events(
        self, body: dict[str, Any], head: dict[str, Any], usage: dict[str, Any], metrics: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        def event(value: dict[str, Any]) -> bytes:
            return b"data: " + json.dumps({**head, **value}, separators=(",", ":")).encode() + b"\n\n"

        for number, word in enumerate(WORDS):
            last = number == len(WORDS) - 1 and not self.calls
            delta = {"delta": {"content": word}} if "prompt" not in body else {"text": word}
            yield event({"choices": [{"index": 0, **delta, "finish_reason": "stop" if last else None}]})
            while not self.gate.is_set():
                await asyncio.sleep(0.01)
        for number, piece in enumerate(self.calls):
            reason = "tool_calls" if number == len(self.calls) - 1 else None
            yield event({"choices": [{"index": 0, "delta": {"tool_calls": [piece]}, "finish_reason": reason}]})
        counts = head["object"].startswith(("message", "response"))
        if counts or (body.get("stream_options") or {}).get("include_usage"):
            yield event({"choices": [], "usage": usage, "metrics": metrics, "system_fingerprint": "f"})
        yield b"data: [DONE]\n\n"


def _in_other_words(response: Response, changed: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]) -> Response:
    """vLLM's answer of a chat as another API has it. ``changed`` makes its events of a chunk of a stream, or of an
    answer the only one, which is whole."""
    if response.status_code != 200:
        return response
    if not isinstance(response, StreamingResponse):
        (whole,) = changed(json.loads(response.body))
        return JSONResponse(whole, response.status_code)

    async def events() -> AsyncIterator[bytes]:
        async for line in response.body_iterator:
            text = bytes(line).removeprefix(b"data: ").strip()
            for each in [] if text == b"[DONE]" else changed(json.loads(text)):
                yield f"event: {each['type']}\ndata: {json.dumps(each)}\n\n".encode()

    return StreamingResponse(events(), 200, None, "text/event-stream")


def _counts(chat: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens that were computed, were cached, and are new."""
    usage = chat["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"] - cached, cached, usage["completion_tokens"]


def _as_message(chat: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "usage" not in chat:
        yield {
            "type": "content_block_delta",
            "delta": {"type": "text_delta", "text": chat["choices"][0]["delta"]["content"]},
        }
        return
    computed, cached, new = _counts(chat)
    usage = {"input_tokens": computed, "cache_read_input_tokens": cached, "output_tokens": new}
    if not chat["choices"]:
        yield {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
        yield {"type": "message_stop"}
        return
    told = {"kv_transfer_params": chat["kv_transfer_params"]} if chat["kv_transfer_params"] else {}
    yield {"type": "message", "content": [{"type": "text", "text": "".join(WORDS)}], "usage": usage, **told}


def _as_response(chat: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "usage" not in chat:
        yield {"type": "response.output_text.delta", "delta": chat["choices"][0]["delta"]["content"]}
        return
    computed, cached, new = _counts(chat)
    details = {"input_tokens": computed + cached, "input_tokens_details": {"cached_tokens": cached}}
    said = {"type": "message", "content": [{"type": "output_text", "text": "".join(WORDS)}]}
    whole: dict[str, Any] = {"object": "response", "output": [said], "usage": {**details, "output_tokens": new}}
    whole |= {name: chat[name] for name in ("kv_transfer_params", "metrics") if name in chat}
    yield whole if chat["choices"] else {"type": "response.completed", "response": whole}
