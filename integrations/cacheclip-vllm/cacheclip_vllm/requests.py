"""Bodies of requests that vLLM reads: the prompt, if a plan can follow all that shapes it.

vLLM's API has many fields, and this file knows only those that shape a prompt. A request that uses one of them in a way
that plans cannot follow goes to vLLM as it is, and is prefilled in full.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cacheclip_serve import CacheClipField, ChatBody, RequestError, parse_field, unsupported, without_nothing

from cacheclip_rag import ConfigurationError
from cacheclip_rag.adapters import allowed_tools, as_object, check_template_kwargs, is_neutral

_MOST_SALT = 1024
"""Most characters of a client's ``cache_salt``, as vLLM has it."""


class NotPlanned(Exception):
    """A request goes to vLLM as it is; the message says why, in words that fit for counting."""


@dataclass(frozen=True, slots=True)
class PlannablePrompt:
    """A prompt that can be planned."""

    prompt: str | list[dict[str, Any]]
    """A text, which is read as it stands, or messages for the chat template."""
    tools: tuple[dict[str, Any], ...] = ()
    """As vLLM gives them to the chat template."""
    parts: Mapping[int, list[dict[str, str]]] = field(default_factory=dict)
    """By the number of their message, the parts that vLLM gives to a template that loops over parts of contents. Others
    get one text, which is the content here: of several parts, one a line; of null beside calls, an empty one."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the chat template."""


_CHAT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "reasoning_effort": (),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}
"""Fields that shape a chat's prompt or its prefill, each with the values that change nothing; null never does."""
_COMPLETION: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "suffix": (),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
}
_IN_MESSAGES = {"assistant": {"tool_calls"}, "tool": {"tool_call_id", "name"}, "system": set(), "user": set()}
"""Roles, and the fields that their messages may have beside role and content."""
_IN_FUNCTIONS = ("name", "description", "parameters")
"""Fields that vLLM gives of every function, in this order."""
_WITHOUT_EFFECT = {
    "max_ttft_s": "ratios are not chosen by time with vLLM",
    "min_confidence": "vLLM gives no logits before the answer begins",
    "finish": "answers of vLLM are not verified",
    "trace": "vLLM does not say what its KV was made of",
}


def take_field(body: dict[str, Any], *, moves: bool = False) -> CacheClipField:
    """The field ``cacheclip``, taken out of the body. ``moves``: KV of earlier prompts is moved, but not of a client
    that shares nothing, nor before calls of tools and answers by a schema, whose first tokens nobody could verify,
    unless it says so. Raises RequestError: it names the part that is wrong, or has no effect."""
    found = parse_field(body.pop("cacheclip", None))
    for name, why in _WITHOUT_EFFECT.items():
        if getattr(found, name) not in (None, "none", "off", "idle", False):
            raise unsupported(f"cacheclip.{name}", f"cacheclip.{name} has no effect here: {why}. Leave it out.")
    if found.moved == "on" and not moves:
        why = "this server has moved = off, prefix_cache_bytes = 0, a required certificate or a GPU"
        raise unsupported("cacheclip.moved", f"cacheclip.moved has no effect here: {why}. Leave it out.")
    if isinstance(found.ratio, str):
        raise unsupported("cacheclip.ratio", "cacheclip.ratio must be a number here: ratios are not chosen by time.")
    if body.get("cache_salt") is not None or (found.moved is None and is_constrained(body)):
        return found.model_copy(update={"moved": "off"})
    return found


def in_vllms_words(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """A body with what the server of :mod:`cacheclip_serve` takes and vLLM refuses said as vLLM takes it. What
    says nothing is left out. Raises RequestError: ``allowed_tools`` that there are not."""
    found = {  # a chat has all fields of a completion but its prompt
        name: value
        for name, value in without_nothing(ChatBody, body).items()
        if not (name in ("max_tokens", "max_completion_tokens") and is_neutral(value, (-1,)))
    }
    if is_neutral(found.get("top_p"), (0,)):  # the likeliest token
        found |= {"top_p": 1, "top_k": 1}
    options = found.get("stream_options")
    if not found.get("stream") and isinstance(options, Mapping) and not options.get("include_usage"):
        del found["stream_options"]
    return _with_allowed_tools(found) if is_chat else found


def _with_allowed_tools(body: dict[str, Any]) -> dict[str, Any]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    try:
        own = dict(zip(("tools", "tool_choice"), allowed_tools(tools, choice), strict=True))
    except ConfigurationError as error:
        raise RequestError(str(error), param="tool_choice") from error
    if not own["tools"] and own["tool_choice"] in ("auto", "none"):
        own = {}
    others = {name: value for name, value in body.items() if name not in ("tools", "tool_choice")}
    return {**others, **{name: value for name, value in own.items() if value is not None}}


def is_constrained(body: Mapping[str, Any]) -> bool:
    """Whether an answer may be calls of tools, or must follow a schema."""
    text = body.get("text")
    formats = body.get("response_format"), text.get("format") if isinstance(text, Mapping) else None
    is_text = all(each.get("type", "text") == "text" for each in formats if isinstance(each, Mapping))
    return bool(body.get("tools")) or not is_text or bool(body.get("structured_outputs"))


def check_carried(body: Mapping[str, Any]) -> None:
    """Raise RequestError if the body holds what only this server may give to vLLM's connector."""
    extra = body.get("vllm_xargs")
    inside = isinstance(extra, Mapping) and "kv_transfer_params" in extra
    if inside or body.get("kv_transfer_params") is not None:
        name = "vllm_xargs.kv_transfer_params" if inside else "kv_transfer_params"
        raise unsupported(name, f"{name} is this server's own. Leave it out.")


def add_system_prompt(body: dict[str, Any], prompt: str | None) -> None:
    """The settings' system prompt, for conversations without one."""
    messages = body.get("messages")
    if prompt and isinstance(messages, list):
        roles = [each.get("role") for each in messages if isinstance(each, Mapping)]
        if not {"system", "developer"} & set(map(str, roles)):
            body["messages"] = [{"role": "system", "content": prompt}, *messages]


def keep_apart(body: dict[str, Any], tenant: str, secret: str) -> None:
    """Salt a tenant's entries of vLLM's prefix cache, where a hit would tell what others have asked."""
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and 0 < len(salt) <= _MOST_SALT):  # else vLLM refuses it
        text = json.dumps([tenant, salt])
        body["cache_salt"] = hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def read_chat(body: Mapping[str, Any], name: str) -> PlannablePrompt:
    """The prompt of a chat with the model's served name. Raises NotPlanned if a plan cannot follow it, or it is
    malformed, which vLLM will say."""
    _check_fields(body, name, _CHAT)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise NotPlanned("malformed")
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise NotPlanned("malformed")
    if tools and body.get("tool_choice") == "none":
        raise NotPlanned("tools with tool_choice none")  # vLLM has a flag that leaves them out
    try:
        variables = check_template_kwargs(body.get("chat_template_kwargs") or {})
    except ConfigurationError as error:  # vLLM says what it takes
        raise NotPlanned("chat_template_kwargs") from error
    read = [_message(each) for each in messages]
    contents = [each.get("content") for each in messages]
    in_parts = {number: each or [] for number, each in enumerate(contents) if not isinstance(each, str)}
    parts = {number: each for number, each in in_parts.items() if len(each) != 1}
    return PlannablePrompt(read, tuple(map(_tool, tools)), parts, variables)


def read_completion(body: Mapping[str, Any], name: str) -> PlannablePrompt:
    """The prompt of a completion; as :func:`read_chat`."""
    _check_fields(body, name, _COMPLETION)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise NotPlanned("prompt is no single text")
    return PlannablePrompt(prompt)


def _check_fields(body: Mapping[str, Any], name: str, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if body.get("model") not in (None, name):
        raise NotPlanned("another model")  # an adapter, or none that there is
    for each_field, values in neutral.items():
        given = body.get(each_field)
        if given is not None and not is_neutral(given, values):
            raise NotPlanned(each_field)


def _message(given: Any) -> dict[str, Any]:
    """A message as vLLM gives it to the chat template."""
    role = given.get("role") if isinstance(given, Mapping) else None
    if not isinstance(role, str):
        raise NotPlanned("malformed")
    if role not in _IN_MESSAGES:
        raise NotPlanned("role of a message")
    known = _IN_MESSAGES[role]
    if any(value for key, value in given.items() if key not in ("role", "content", *known)):
        raise NotPlanned("field of a message")
    fields = {key: value for key, value in given.items() if key in known and value}
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(fields["tool_calls"])
    is_null = given.get("content") is None and "tool_calls" in fields  # as clients of OpenAI send it with calls
    return {"role": role, "content": "" if is_null else _content(given.get("content")), **fields}


def _content(given: Any) -> str:
    match given:
        case str():
            return given
        case [_, *_] if all(_is_text(part) for part in given):
            return "\n".join(part["text"] for part in given)
        case list():
            raise NotPlanned("parts of a content")
    raise NotPlanned("no content")


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and {*part} == {"type", "text"}
        and part["type"] == "text"
        and (isinstance(part["text"], str))
    )


def _calls(given: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects."""
    found = []
    for call in given if isinstance(given, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise NotPlanned("malformed")
        arguments = as_object(function.get("arguments") or {})
        if arguments is None:
            raise NotPlanned("arguments of a call")
        assert isinstance(call, Mapping), "its function was read"
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _tool(given: Any) -> dict[str, Any]:
    """A definition with the fields that vLLM gives to the chat template."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or set(given) - {"type", "function"}:
        raise NotPlanned("definition of a tool")
    if set(function) - {*_IN_FUNCTIONS, "strict"}:
        raise NotPlanned("definition of a tool")
    shown = {name: function.get(name) for name in _IN_FUNCTIONS}
    if function.get("strict") is not None:
        shown["strict"] = function["strict"]
    return {"type": "function", "function": shown}
