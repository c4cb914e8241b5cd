"""What adapters for frameworks and servers share: fields of settings, streams, tools, texts of messages, precomputing,
a client of a remote server. Each name loads what it needs when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..answering.sampler import room_for
    from ..base.checks import ALIASES
    from ..base.sampling import FINISH_MODES, LEAST_PENALTY
    from ..fusion.answer import last_answer
    from ..prompt.messages import check_template_kwargs
    from ..prompt.segments import chunk_texts, normalise_chunk
    from ..prompt.tools import as_name, as_object, check_tools, past_calls, with_whole_characters
    from .aio import answer_in_thread, iterate_in_thread
    from .finishing import final_events
    from .forced_tools import SCHEMA_OF_CALLS, allowed_tools, can_constrain, forced_tool, uses_tools, with_tool_choice
    from .neutral import IGNORED, NEUTRAL, changes_nothing, is_neutral, says_nothing
    from .precomputing import PrecomputeCost, all_stored, precompute_cost, precompute_in_batches
    from .remote import RemoteEngine
    from .served import ServedFields
    from .settings import EngineFields, ModelFields, Tokenizer
    from .usage import telemetry, token_usage

__all__ = [
    "ALIASES",
    "FINISH_MODES",
    "IGNORED",
    "LEAST_PENALTY",
    "NEUTRAL",
    "SCHEMA_OF_CALLS",
    "EngineFields",
    "ModelFields",
    "PrecomputeCost",
    "RemoteEngine",
    "ServedFields",
    "Tokenizer",
    "all_stored",
    "allowed_tools",
    "answer_in_thread",
    "as_name",
    "as_object",
    "can_constrain",
    "changes_nothing",
    "check_template_kwargs",
    "check_tools",
    "chunk_texts",
    "final_events",
    "forced_tool",
    "is_neutral",
    "iterate_in_thread",
    "last_answer",
    "normalise_chunk",
    "past_calls",
    "precompute_cost",
    "precompute_in_batches",
    "room_for",
    "says_nothing",
    "telemetry",
    "token_usage",
    "uses_tools",
    "with_tool_choice",
    "with_whole_characters",
]

_HOMES = {
    "ALIASES": "..base.checks",
    "FINISH_MODES": "..base.sampling",
    "IGNORED": "neutral",
    "LEAST_PENALTY": "..base.sampling",
    "NEUTRAL": "neutral",
    "SCHEMA_OF_CALLS": "forced_tools",
    "EngineFields": "settings",
    "ModelFields": "settings",
    "PrecomputeCost": "precomputing",
    "RemoteEngine": "remote",
    "ServedFields": "served",
    "Tokenizer": "settings",
    "all_stored": "precomputing",
    "allowed_tools": "forced_tools",
    "answer_in_thread": "aio",
    "as_name": "..prompt.tools",
    "as_object": "..prompt.tools",
    "can_constrain": "forced_tools",
    "changes_nothing": "neutral",
    "check_template_kwargs": "..prompt.messages",
    "check_tools": "..prompt.tools",
    "chunk_texts": "..prompt.segments",
    "final_events": "finishing",
    "forced_tool": "forced_tools",
    "is_neutral": "neutral",
    "iterate_in_thread": "aio",
    "last_answer": "..fusion.answer",
    "normalise_chunk": "..prompt.segments",
    "past_calls": "..prompt.tools",
    "precompute_cost": "precomputing",
    "precompute_in_batches": "precomputing",
    "room_for": "..answering.sampler",
    "says_nothing": "neutral",
    "telemetry": "usage",
    "token_usage": "usage",
    "uses_tools": "forced_tools",
    "with_tool_choice": "forced_tools",
    "with_whole_characters": "..prompt.tools",
}
__getattr__ = late_names(__name__, _HOMES)
