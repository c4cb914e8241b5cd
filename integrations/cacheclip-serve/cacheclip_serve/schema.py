"""Bodies of requests in OpenAI's format. Whatever would change the answer and is not followed is refused by name; what
cannot change it is ignored, and counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from cacheclip_rag import CacheClipError, ConfigurationError
from cacheclip_rag.adapters import (
    IGNORED,
    LEAST_PENALTY,
    NEUTRAL,
    SCHEMA_OF_CALLS,
    allowed_tools,
    changes_nothing,
    check_template_kwargs,
    check_tools,
    forced_tool,
    says_nothing,
    with_tool_choice,
)
from cacheclip_rag.runtime import Message

from .bounds import MOST_ANSWERS, MOST_LOGPROBS
from .errors import RequestError, error_of, unsupported
from .field import CacheClipField
from .messages import BodyPart, RequestMessage

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
_VERBOSITIES = frozenset({"low", "medium", "high"})
_SWITCHES = frozenset({"verbosity", "reasoning_effort", "reasoning", "think", "thinking", "enable_thinking"})
"""Fields that templates may follow."""
_COUNTED = frozenset({*IGNORED, *NEUTRAL, *_SWITCHES, "options", "logit_bias", "functions", "extra_body"})
"""Those that are counted by name if they are ignored."""
_REASONS = {
    "best_of": "this server computes no more answers than it gives. Set n",
    "echo": "this server does not repeat the prompt",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "repeat_penalty": "give repetition_penalty instead",
    "system": "give a message of role system instead",
    **dict.fromkeys(("num_predict", "n_predict", "max_new_tokens", "max_length"), "give max_tokens instead"),
    **dict.fromkeys(
        ("format", "guided_json", "structured_outputs", "grammar", "json_schema"), "give response_format instead"
    ),
}

B = TypeVar("B", bound="Body")


def _whole(value: Any) -> Any:
    """Many clients write whole numbers as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_limit(value: Any) -> Any:
    """-1 is what llama.cpp's clients send for no limit."""
    return None if value == -1 and not isinstance(value, bool) else _whole(value)


def _no_flag(value: Any) -> Any:
    """Chats have a flag of the same name, and false asks for nothing."""
    return None if value is False else value


WholeNumber = Annotated[int | None, BeforeValidator(_whole)]
Limit = Annotated[int | None, BeforeValidator(_no_limit)]


class _StreamOptions(BodyPart):
    include_usage: bool | None = None


class Body(BodyPart):
    """What both kinds of requests have."""

    model: str | None = None
    """Name that the server serves; absent: whatever it serves."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: WholeNumber = Field(default=None, ge=-1)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_PENALTY, le=10)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: WholeNumber = Field(default=None, ge=-(2**63), lt=2**63)
    n: WholeNumber = Field(default=None, ge=1, le=MOST_ANSWERS)
    """Answers to each prompt."""
    stop: str | list[str] | None = None
    max_tokens: Limit = Field(default=None, ge=1, lt=2**31)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cacheclip: CacheClipField | None = None

    @property
    def field(self) -> CacheClipField:
        return self.cacheclip or CacheClipField()

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def prompts(self) -> Sequence[str | list[Message]]:
        """Texts, or messages in the engine's format, each of which is answered."""
        raise NotImplementedError

    @property
    def seeds(self) -> list[int | None]:
        """Seeds of the answers to one prompt: the one that was given, and those that follow it."""
        first, count = self.seed, self.n or 1
        if first is None:
            return [None] * count
        return [(first + number + 2**63) % 2**64 - 2**63 for number in range(count)]  # after the last comes the first

    @property
    def one_call(self) -> bool:
        """Whether calls of tools after the first are left out."""
        return False

    def ignored(self, variables: Collection[str] = ()) -> list[str]:
        """Fields that were sent and not read, as they are counted. ``variables``: those that the template reads."""
        given = (self.model_extra or {}).items()
        return [name if name in _COUNTED else "other" for name, value in given if value is not None]

    def sampling(self) -> dict[str, Any]:
        """Options of the call that the request states, by the engine's names. Tools are among them."""
        names = ("temperature", "top_p", "top_k", "seed", "stop", "max_tokens")
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        stated = {name: getattr(self, name) for name in (*names, *penalties)}
        return {name: value for name, value in stated.items() if value is not None}

    def check(self) -> None:
        """Raise RequestError for fields that would change the answer and are not followed."""
        for place, name, value in _flat(self.model_extra or {}):
            if changes_nothing(name, value):
                continue
            if place == name and (_variables(name, value) or (name == "thinking" and isinstance(value, dict))):
                continue
            why = _REASONS.get(name, "this server does not follow it. Leave it out")
            if place != name and name in type(self).model_fields:
                why = f"give {name} beside the messages instead"
            raise unsupported(place, f"{place} is not supported with this value: {why}.")
        if self.stream_options is not None and self.stream_options.include_usage and not self.stream:
            raise RequestError("stream_options needs stream=true.", param="stream_options")
        if self.stream and len(self.prompts) * (self.n or 1) > 1:
            raise unsupported("stream", "several answers are not streamed. Leave stream out, or ask for one at a time.")


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Fields with their places and names; of Ollama's ``options``, each for itself."""
    for name, value in fields.items():
        if name == "options" and isinstance(value, dict):
            yield from ((f"options.{each}", each, value[each]) for each in value)
        else:
            yield name, name, value


def _variables(name: str, value: Any) -> dict[str, Any]:
    """Variables of chat templates by which a field is followed, in the ways of Qwen 3, DeepSeek and GPT-OSS; empty for
    other fields and values. A template without them leaves the field ignored."""
    match name, value:
        case "verbosity", str() if value in _VERBOSITIES:
            return {"verbosity": value}
        case ("reasoning_effort" | "think", str() as effort) | ("reasoning", {"effort": str() as effort}) if (
            effort in _EFFORTS
        ):
            return _thinking(False) if effort == "none" else {"reasoning_effort": effort}
        case ("enable_thinking" | "thinking" | "think", bool() as on) | ("reasoning", {"enabled": bool() as on}):
            return _thinking(on)
        case "thinking", {"type": "enabled" | "disabled" as kind}:
            return _thinking(kind == "enabled")
    return {}


def _thinking(on: bool) -> dict[str, Any]:
    return dict.fromkeys(("enable_thinking", "thinking"), on)


class ChatBody(Body):
    """Body of a request to ``/v1/chat/completions``."""

    messages: list[RequestMessage] = Field(min_length=1)
    max_completion_tokens: Limit = Field(default=None, ge=1, lt=2**31)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber = Field(default=None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    def ignored(self, variables: Collection[str] = ()) -> list[str]:
        in_messages = set().union(*(message.ignored for message in self.messages))
        given = self.model_extra or {}
        return [
            *(each for each in super().ignored() if _variables(each, given.get(each)).keys().isdisjoint(variables)),
            *sorted(f"messages.{name}" for name in in_messages),
        ]

    @property
    def prompts(self) -> Sequence[str | list[Message]]:
        last = max((n for n, message in enumerate(self.messages) if message.role == "user"), default=0)
        old = [
            n < last or each.role in ("tool", "function") or (each.role == "assistant" and n + 1 < len(self.messages))
            for n, each in enumerate(self.messages)
        ]
        return [[each.for_engine(f"messages[{n}]", is_old=old[n]) for n, each in enumerate(self.messages)]]

    @property
    def one_call(self) -> bool:
        return self.parallel_tool_calls is False

    def sampling(self) -> dict[str, Any]:
        options = super().sampling()
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        schema = _json_schema(self.response_format)
        if schema is not None:
            options["json_schema"] = schema
        tools, choice = _allowed(self.tools, self.tool_choice)
        if tools:
            options["tools"] = _checked_tools(tools)
        variables = {**self._switched, **(self.chat_template_kwargs or {})}
        if variables:
            try:
                options["chat_template_kwargs"] = check_template_kwargs(variables)
            except ConfigurationError as error:
                raise RequestError(str(error), param="chat_template_kwargs") from error
        if schema is not None and self._holds_calls:
            return options
        try:
            return with_tool_choice({**options, "tool_choice": _checked_choice(choice, bool(tools))})
        except ConfigurationError as error:
            raise RequestError(str(error), param="tool_choice") from error

    @property
    def _holds_calls(self) -> bool:
        """Whether the schema of the answer holds the calls of tools already, as the adapters make it."""
        named = (self.response_format or {}).get("json_schema")
        return isinstance(named, dict) and named.get("name") == SCHEMA_OF_CALLS

    @property
    def _switched(self) -> dict[str, Any]:
        """Variables of the chat template that other fields state. Of several on thinking, the one that switches it off
        counts."""
        found: dict[str, Any] = {}
        for variables in (_variables(name, value) for name, value in (self.model_extra or {}).items()):
            found |= {name: value for name, value in variables.items() if found.get(name) is not False}
        return found

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise RequestError("give max_completion_tokens or max_tokens, not both.", param="max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
        _ = self.prompts, self.sampling()


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(tools):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            raise RequestError(
                f'tools[{number}] must be {{"type": "function", "function": {{…}}}}, the only kind on this server.',
                param=f"tools[{number}]",
            )
    try:
        return check_tools([{"type": "function", "function": tool["function"]} for tool in tools])
    except ConfigurationError as error:
        raise RequestError(str(error), param="tools") from error


def _allowed(tools: Any, choice: Any) -> tuple[Any, Any]:
    try:
        return allowed_tools(tools, choice)
    except ConfigurationError as error:
        raise RequestError(str(error), param="tool_choice") from error


def _checked_choice(choice: str | dict[str, Any] | None, has_tools: bool) -> str | dict[str, Any] | None:
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(
            f"tool_choice must be none, auto, required or a function, got {choice[:80]!r}.", param="tool_choice"
        )
    if isinstance(choice, dict) and choice.get("type") != "function":
        raise unsupported(
            "tool_choice", f"tool_choice must have type 'function', got {str(choice.get('type'))[:80]!r}."
        )
    if forced_tool(choice)[0] and not has_tools:
        raise RequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    return choice


def _json_schema(wanted: Mapping[str, Any] | None) -> Any:
    """The JSON schema that the answer must follow; None: any text."""
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        found = wanted.get("json_schema")
        if isinstance(found, Mapping) and isinstance(found.get("schema"), Mapping):
            return found["schema"]
        raise RequestError(
            'response_format must be {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}.',
            param="response_format.json_schema.schema",
        )
    raise unsupported(
        "response_format.type", f"response_format must be text, json_object or json_schema, got {str(kind)[:80]!r}."
    )


def list_of_prompts(value: Any) -> Any:
    """A text or a list of texts as a list."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ValueError("this server takes a text or a list of texts, none of them empty, and no token ids")
    return found


class CompletionBody(Body):
    """Body of a request to ``/v1/completions``. Its prompts are read as they stand, without the chat template."""

    prompt: Annotated[list[str], BeforeValidator(list_of_prompts)]
    logprobs: Annotated[WholeNumber, BeforeValidator(_no_flag)] = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def prompts(self) -> Sequence[str | list[Message]]:
        return self.prompt

    def sampling(self) -> dict[str, Any]:
        options = {"max_tokens": 16, **super().sampling()}  # OpenAI's default
        return options if self.logprobs is None else {**options, "logprobs": self.logprobs}


def without_nothing(kind: type[Body], given: Mapping[str, Any]) -> dict[str, Any]:
    """A body without what says nothing: null and empty values of fields that may be left out, and empty stop strings.
    What else another server may read stays."""
    optional = {name for name, field in kind.model_fields.items() if not field.is_required()}
    found = dict(given)
    if isinstance(stops := found.get("stop"), list):
        found["stop"] = [each for each in stops if not says_nothing(each)]
    return {name: value for name, value in found.items() if name not in optional or not says_nothing(value)}


def parse(kind: type[B], given: Mapping[str, Any]) -> B:
    """The body of a request, checked. Raises RequestError: it names the field that is wrong."""
    body = validated(kind, without_nothing(kind, given))
    body.check()
    return body


def parse_field(given: Any) -> CacheClipField:
    """The field ``cacheclip`` of a body whose other fields another server reads. Raises RequestError: it names the part
    that is wrong."""
    return validated(_FieldOnly, {"cacheclip": given}).cacheclip or CacheClipField()


class _FieldOnly(BodyPart):
    cacheclip: CacheClipField | None = None


P = TypeVar("P", bound=BodyPart)


def validated(kind: type[P], given: Mapping[str, Any]) -> P:
    """A body by its types. Raises RequestError: it names the field that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _named(error) from None
    except RequestError:
        raise
    except CacheClipError as error:  # of the field cacheclip as a whole
        raise RequestError(str(error), param="cacheclip") from error


def _named(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    cause = getattr(cause, "__cause__", None) or cause
    param = _path(first["loc"])
    if isinstance(cause, CacheClipError):
        found = error_of(cause)
        return RequestError(found.message, param=found.param or param, code=found.code)
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_type"
    return RequestError(f"{param}: {first['msg'].removeprefix('Value error, ')}.", param=param, code=code)


def _path(place: Sequence[int | str]) -> str:
    """A place in a body, such as ``messages[0].content``. The names of alternatives at its end are left out."""
    path = ""
    for each in place:
        if isinstance(each, int):
            path += f"[{each}]"
        elif each not in ("str", "float", "list[str]", "dict[str,any]"):
            path += f".{each}" if path else each
    return path
