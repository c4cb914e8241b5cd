"""Calls of tools that must happen, and what frameworks say about them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ..base.errors import ConfigurationError
from ..base.sampling import SamplingParams
from ..prompt.tools import call_schema, check_tools
from ..runtime.base import Message, Runtime
from .neutral import says_nothing

SCHEMA_OF_CALLS = "call_or_answer"
"""Name of a ``response_format`` whose schema holds the calls of the tools already."""


def can_constrain() -> bool:
    return find_spec("llguidance") is not None


def uses_tools(runtime: Runtime) -> bool:
    """Whether the model's chat template writes a tool that it is given."""
    if not runtime.has_chat_template:
        return False
    messages: list[Message] = [{"role": "user", "content": "?"}]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    try:
        return runtime.render_chat(messages) != runtime.render_chat(messages, tools=[tool])
    except ConfigurationError:  # a template that refuses them
        return False


def with_tool_choice(options: Mapping[str, Any]) -> dict[str, Any]:
    """A call's options with ``tool_choice`` and OpenAI's ``response_format`` turned into ``json_schema``: an answer
    that must be a call is constrained to be one. ``none`` leaves the tools out, ``allowed_tools`` the
    others. With tools and a ``json_schema``, the answer is a call or follows the schema. Raises ConfigurationError: a
    choice without tools, of an unknown tool, or beside a ``json_schema``; or a ``response_format`` that is none."""
    options = dict(options)
    asked = _schema_of(options.pop("response_format", None))
    if asked is not None:
        if options.get("json_schema") is not None:
            raise ConfigurationError("response_format and json_schema both say what the answer must be. Give one.")
        options["json_schema"] = asked
    tools, choice = allowed_tools(options.get("tools"), options.pop("tool_choice", None))
    if tools is not None:
        options["tools"] = tools
    if choice == "none":
        options.pop("tools", None)
    forced, only = forced_tool(choice)
    if forced:
        if options.get("json_schema") is not None:
            raise ConfigurationError("tool_choice and json_schema both say what the answer must be. Give one of them.")
        options["json_schema"] = call_schema(check_tools(options.get("tools") or ()), only)
    elif options.get("tools") and options.get("json_schema") is not None:
        wanted = SamplingParams(json_schema=options["json_schema"]).json_schema  # as text, checked
        options["json_schema"] = call_schema(check_tools(options["tools"]), otherwise=json.loads(wanted))
    return options


def _schema_of(wanted: Any) -> Any:
    """The JSON schema of a ``response_format``; None: any text."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else wanted
    if says_nothing(wanted) or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    named = wanted.get("json_schema") if isinstance(wanted, Mapping) and kind == "json_schema" else None
    if isinstance(named, Mapping) and isinstance(named.get("schema"), Mapping):
        return named["schema"]
    raise ConfigurationError(
        'response_format must be {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}} or {"type": '
        f'"json_object"}}, got {str(wanted)[:80]!r}. For a pydantic class use with_structured_output.'
    )


def allowed_tools(tools: Any, choice: Any) -> tuple[Any, Any]:
    """Tools and ``tool_choice``: of OpenAI's ``allowed_tools``, the tools that it names, and its mode. Others stay as
    they are. Raises ConfigurationError: it is malformed, or names a tool that there is not."""
    if not _allows(choice):
        return tools, choice
    own = _part(choice, "allowed_tools")
    mode, listed = own.get("mode"), own.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not all(map(_name, listed)):
        raise ConfigurationError(
            'tool_choice of type allowed_tools must have a mode, auto or required, and tools: [{"type": "function", '
            f'"function": {{"name": …}}}}, …], got {str(own)[:80]}.'
        )
    known = {_name(tool): tool for tool in (tools if isinstance(tools, list | tuple) else ())}
    if unknown := [name for name in map(_name, listed) if name not in known]:
        raise ConfigurationError(f"tool_choice allows {unknown[0]!r}, and there is no such tool.")
    return [known[name] for name in dict.fromkeys(map(_name, listed))], mode


def _allows(choice: Any) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == "allowed_tools"


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of an object, or the object itself, as OpenAI's newer API has it."""
    part = whole.get(name)
    return part if isinstance(part, Mapping) else whole


def _name(tool: Any) -> str | None:
    name = _part(tool, "function").get("name") if isinstance(tool, Mapping) else None
    return name if isinstance(name, str) else None


def forced_tool(choice: Any) -> tuple[bool, str | None]:
    """Whether a tool must be called, and which; None: any of them. None, ``auto`` and ``none``: none must; ``any``,
    ``required`` and True: any; a name or an OpenAI dict with a name: this one."""
    if _allows(choice):
        choice = _part(choice, "allowed_tools").get("mode")
    if isinstance(choice, Mapping) and choice:
        named = _part(choice, "function").get("name")
        if not isinstance(named, str):
            raise ConfigurationError(f"tool_choice must name a tool, got {dict(choice)}.")
        return True, named
    if choice is True or choice in ("any", "required"):
        return True, None
    if isinstance(choice, str) and choice not in ("", "auto", "none"):
        return True, choice
    if choice in (None, False, "", {}, "auto", "none"):
        return False, None
    raise ConfigurationError(f"tool_choice must be any, auto, none or the name of a tool, got {choice!r}.")
