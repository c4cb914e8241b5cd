"""A client of ``cacheclip serve`` with the calls of an engine that the adapters use."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import SplitResult, unquote, urlsplit

from ..answering.options import CallKeywords, CallOptions
from ..base.errors import CacheClipError, ConfigurationError, MissingExtraError, PromptTooLongError, ServerError
from ..base.sampling import SamplingParams
from ..fusion.answer import Answer, Event, FusionStats
from ..prompt.tools import ToolCall, as_object, check_calls
from .forced_tools import SCHEMA_OF_CALLS

if TYPE_CHECKING:
    import httpx

    from ..prompt.messages import Prompt

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0
"""As the server's own."""
_LONGEST_S = 1_000_000.0
"""Far above any wait, and within what a socket takes."""
_DEFAULTS = SamplingParams()
_names: dict[str, str] = {}
"""Served names, by the addresses of servers that have answered."""
_UNKNOWN_ID = -1
"""Stands for each token of an answer, because a server does not send their ids."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server says of its model."""

    name: str
    context_tokens: int
    uses_tools: bool
    can_constrain: bool


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """Answers by a server. It holds no connection of its own, so that it can be copied and pickled."""

    base_url: str = field(repr=False)
    """With ``/v1`` at its end, as for OpenAI's client."""
    api_key: str | None = field(default=None, repr=False)
    model: str | None = None
    """Served name; None: whatever the server has."""
    tenant: str | None = None
    system_prompt: str | None = None
    """For conversations without a system message."""
    timeout_s: float | None = None
    """Longest wait for the next piece of an answer; default 600 seconds."""

    def __post_init__(self) -> None:
        _parts(self.base_url)
        if (key := self.api_key) and not (key.isascii() and key.isprintable() and key == key.strip()):
            raise ConfigurationError(
                "api_key must be printable ASCII without spaces at its ends, because it is sent in a header; got other "
                "characters. Copy it again from the server's."
            )
        if self.timeout_s is not None and not 0 < self.timeout_s <= _LONGEST_S:
            raise ConfigurationError(
                f"timeout must be between 0 and {_LONGEST_S:,.0f} seconds, got {self.timeout_s}. Leave it out for "
                f"{_TIMEOUT_S:.0f}."
            )

    @property
    def name(self) -> str:
        """The served name as far as it is known: without asking for it."""
        return self.model or _names.get(self.base_url, "cacheclip")

    @property
    def served(self) -> ServedModel:
        """What the server says of its model; asked once."""
        return _served(self)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: CallOptions | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Iterator[Event]:
        """Events of an answer, with the arguments of :meth:`~cacheclip_rag.engine.CacheClipEngine.stream`. A string is
        one user message. Sources of documents stay here: a server has no use for them.

        Raises:
            ConfigurationError: the server refuses the request.
            PromptTooLongError: the prompt does not fit the model's context.
            ServerError: the server cannot be reached, has no room, or refuses the API key.
        """
        options = (options or CallOptions()).with_options({"params": params, **keywords})
        if options.method is not None and not isinstance(options.method, str):
            raise ConfigurationError("a server takes names of methods only. Give a preset's name, or leave it out.")
        if options.trace:
            raise ConfigurationError('trace is not read from a server here. Ask it for {"cacheclip": {"trace": true}}.')
        own = {
            "documents": list(options.documents),
            "method": options.method,
            "ratio": options.recompute_ratio,
            "max_ttft_s": options.max_ttft_s,
            "finish": options.finish,
            "moved": options.moved,
            "question": options.question,
            "tenant": self.tenant,
        }
        body = {
            "messages": self._messages(prompt),
            **_sampling(options.params, has_tools=bool(options.tools)),
            **({"model": self.model} if self.model else {}),
            **({"tools": list(options.tools)} if options.tools else {}),
            **({"chat_template_kwargs": dict(variables)} if (variables := options.chat_template_kwargs) else {}),
            "stream": True,
            "stream_options": {"include_usage": True},
            "cacheclip": {name: value for name, value in own.items() if value not in (None, [])},
        }
        return self._events(body)

    def _events(self, body: Mapping[str, Any]) -> Iterator[Event]:
        reading, content = _StreamReading(), _as_json(body)
        with (
            self._errors(),
            _client().stream("POST", self._path("/chat/completions"), content=content, **self._options()) as response,
        ):
            if response.status_code != 200:
                response.read()
                raise _refusal(response)
            for line in _lines(response.iter_bytes()):
                if line.startswith(b":"):
                    yield Event("")  # the server is alive; a consumer who has left stops here
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    break
                with self._reading(data):
                    chunk = json.loads(data)
                    _names[self.base_url] = str(chunk.get("model") or self.name)
                    event = reading.read(chunk)
                if event is not None:
                    yield event
        with self._reading("no statistics of cacheclip"):
            calls = reading.calls()
            answer = reading.answer(calls)
        if calls:
            yield Event("", tool_calls=calls)
        yield Event("", answer)

    def _messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(_message, prompt)]
        if self.system_prompt and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def _get(self, path: str) -> Any:
        with self._errors():
            response = _client().get(self._path(path), **self._options())
        if response.status_code != 200:
            raise _refusal(response)
        with self._reading(response.content):
            return response.json()

    def _path(self, path: str) -> str:
        return self._address + path

    @property
    def _address(self) -> str:
        """The server's, without user and password."""
        parts = _parts(self.base_url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"

    def _options(self) -> dict[str, Any]:
        import httpx

        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        headers["content-type"] = "application/json"
        timeout = httpx.Timeout(30.0, read=self.timeout_s or _TIMEOUT_S, pool=None)
        parts = _parts(self.base_url)
        named = parts.username is not None or parts.password is not None
        auth = (unquote(parts.username or ""), unquote(parts.password or "")) if named else None  # httpx logs URLs
        return {"headers": headers, "timeout": timeout, "auth": auth}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the connection as errors of this library."""
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # ValueError: no name of a host
            raise ServerError(
                f"the server at {self._address} cannot be reached, or broke off: {error or type(error).__name__}. "
                "Start it with: cacheclip serve"
            ) from error

    @contextmanager
    def _reading(self, what: object) -> Iterator[None]:
        """Whatever goes wrong with what a server has sent as an error of this library: frameworks swallow others."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ServerError(
                f"the server at {self._address} sent what a cacheclip server does not send: {str(what)[:80]}. If it is "
                "one, wait until its model is loaded; for another server, use the client of OpenAI."
            ) from error


def _parts(base_url: str) -> SplitResult:
    """Parts of a server's address. Raises ConfigurationError, which does not quote it: what is wrong may be that a
    password has a slash."""
    with suppress(ValueError):
        parts = urlsplit(base_url)
        plain = not (parts.query or parts.fragment or "@" in parts.path)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and plain:
            return parts
    raise ConfigurationError(
        "base_url must be the address of a server, such as http://127.0.0.1:8000/v1, without ? and #. In a password, "
        "write what means something in URLs as %2F."
    )


class _StreamReading:
    """Chunks of a stream on their way to an answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _CallPieces] = {}
        """By the index that its pieces name."""
        self._reason = "stop"
        self._usage: Mapping[str, Any] = {}
        self._stats: Mapping[str, Any] | None = None

    def read(self, chunk: Mapping[str, Any]) -> Event | None:
        """The event of a chunk, if it has text. Calls are known at the end only, because they may come in pieces."""
        if "error" in chunk:
            raise _error(200, chunk["error"])
        self._usage = chunk.get("usage") or self._usage
        self._stats = chunk.get("cacheclip") or self._stats
        text = reasoning = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""  # ours, and vLLM's
            for piece in delta.get("tool_calls") or ():
                self._calls.setdefault(piece.get("index", len(self._calls)), _CallPieces()).add(piece)
            self._reason = choice.get("finish_reason") or self._reason
        self._texts.append(text)
        self._reasoning.append(reasoning)
        return Event(text, reasoning=reasoning) if text or reasoning else None

    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of the whole answer. One that was cut off, or that is no call, is left out, and logged."""
        calls = [self._calls[index].whole() for index in sorted(self._calls)]
        return tuple(call for call in calls if call is not None)

    def answer(self, calls: tuple[ToolCall, ...]) -> Answer:
        known = {each.name for each in fields(FusionStats)}
        stats = FusionStats(**{name: value for name, value in (self._stats or {}).items() if name in known})
        ids = (_UNKNOWN_ID,) * int(self._usage.get("completion_tokens") or 0)
        reason = "length" if self._reason == "length" else "stop"
        return Answer("".join(self._texts), ids, reason, stats, tool_calls=calls, reasoning="".join(self._reasoning))


@dataclass(slots=True)
class _CallPieces:
    """A call whose name comes first, and its arguments piece by piece, as vLLM sends it; or as a whole."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def add(self, piece: Mapping[str, Any]) -> None:
        function = piece.get("function") or {}
        self.id = self.id or piece.get("id") or ""
        self.name = self.name or function.get("name") or ""
        self.arguments += function.get("arguments") or ""

    def whole(self) -> ToolCall | None:
        """The call; None if its name is missing, or its arguments are no JSON object."""
        arguments = as_object(self.arguments or {})
        if not self.name or arguments is None:
            logger.warning(
                "a call of a tool is left out: expected a name and a JSON object, got %r and %.200r. If the answer was "
                "cut off, raise max_tokens.",
                self.name,
                self.arguments,
            )
            return None
        return ToolCall(self.name, arguments, self.id) if self.id else ToolCall(self.name, arguments)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Lines of a stream. Only a line feed ends one: JSON may hold other characters that count as ends of lines."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's format, in which arguments of calls are text."""
    written = {name: value for name, value in message.items() if value}
    written["content"] = message.get("content") or ""
    if "tool_calls" in written:
        written["tool_calls"] = [
            {
                "id": call.get("id", ""),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in check_calls(written["tool_calls"])
        ]
    return written


def _sampling(params: SamplingParams, *, has_tools: bool) -> dict[str, Any]:
    stated: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
    for name in ("top_k", "repetition_penalty", "frequency_penalty", "presence_penalty", "stop", "seed"):
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name):
            stated[name] = [*value] if name == "stop" else value
    if params.json_schema is not None:
        name = SCHEMA_OF_CALLS if has_tools else "answer"
        schema = {"name": name, "schema": json.loads(params.json_schema), "strict": True}
        stated["response_format"] = {"type": "json_schema", "json_schema": schema}
    return stated


def _as_json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"a request must be JSON: texts without halves of characters, numbers, lists and dicts; {error}."
        ) from error


def _refusal(response: httpx.Response) -> CacheClipError:
    try:
        said = response.json()["error"]
    except (LookupError, RecursionError, TypeError, ValueError):
        said = f"status {response.status_code}"
    return _error(response.status_code, said)


def _error(status: int, said: Any) -> CacheClipError:
    said = said if isinstance(said, Mapping) else {"message": said}
    message = f"the server says: {said.get('message')}"
    if said.get("code") == "context_length_exceeded":
        return PromptTooLongError(message)
    if status in (400, 404, 415, 422) or (status == 200 and said.get("type") == "invalid_request_error"):
        return ConfigurationError(message)
    return ServerError(message, status)


@lru_cache(64)
def _served(engine: RemoteEngine) -> ServedModel:
    models = engine._get("/models")
    with engine._reading(models):
        card = next((each for each in models["data"] if engine.model in (None, each["id"])), None)
        if card is None:
            raise ConfigurationError(f"the server at {engine._address} has no model {engine.model!r}.")
        own = card["cacheclip"]
        served = ServedModel(
            str(card["id"]), int(card["max_model_len"]), bool(own["uses_tools"]), bool(own["can_constrain"])
        )
    _names[engine.base_url] = served.name
    return served


_clients: dict[int, httpx.Client] = {}
"""Connections, by the process that opened them. Those of the process from which this one was forked stay as they are:
two processes on one connection would take each other's answers."""


def _client() -> httpx.Client:
    if os.getpid() not in _clients:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError("httpx (for base_url)", "langchain") from error
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        _clients.setdefault(os.getpid(), httpx.Client(limits=limits))
    return _clients[os.getpid()]
