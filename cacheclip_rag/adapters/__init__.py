"""What adapters for frameworks and servers share: fields of settings, streams, tools, texts of messages, precomputing,
a client of a remote server. Each name loads what it needs when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from ..answering.decoding import room_for as room_for
    from ..base.checks import ALIASES as ALIASES
    from ..base.sampling import (
        FINISH_MODES as FINISH_MODES,
        LEAST_PENALTY as LEAST_PENALTY,
        MOVED_MODES as MOVED_MODES,
    )
    from ..chunks.context import CONTEXTS as CONTEXTS, context_name as context_name
    from ..finding.common_parts import WINDOW as WINDOW, standing_in as standing_in
    from ..fusion.answer import last_answer as last_answer
    from ..prompt.layout import MOST_PARTIAL as MOST_PARTIAL, share_of as share_of
    from ..prompt.messages import Prompt as Prompt, check_template_kwargs as check_template_kwargs
    from ..prompt.segments import (
        check_messages as check_messages,
        chunk_texts as chunk_texts,
        normalise_chunk as normalise_chunk,
    )
    from ..prompt.tools import (
        as_name as as_name,
        as_object as as_object,
        check_tools as check_tools,
        past_calls as past_calls,
        with_whole_characters as with_whole_characters,
    )
    from .aio import answer_in_thread as answer_in_thread, iterate_in_thread as iterate_in_thread
    from .finishing import final_events as final_events, telemetry as telemetry, token_usage as token_usage
    from .forced_tools import (
        SCHEMA_OF_CALLS as SCHEMA_OF_CALLS,
        allowed_tools as allowed_tools,
        can_constrain as can_constrain,
        forced_tool as forced_tool,
        uses_tools as uses_tools,
        with_tool_choice as with_tool_choice,
    )
    from .neutral import (
        IGNORED as IGNORED,
        NEUTRAL as NEUTRAL,
        changes_nothing as changes_nothing,
        is_neutral as is_neutral,
        says_nothing as says_nothing,
    )
    from .page import html_table as html_table, whole_page as whole_page
    from .precomputing import (
        PrecomputeCost as PrecomputeCost,
        all_stored as all_stored,
        precompute_cost as precompute_cost,
        precompute_in_batches as precompute_in_batches,
    )
    from .remote import RemoteEngine as RemoteEngine
    from .served import ServedFields as ServedFields
    from .settings import EngineFields as EngineFields, ModelFields as ModelFields, Tokenizer as Tokenizer


__getattr__, __all__ = late_names(
    __name__,
    {
        "..answering.decoding": "room_for",
        "..base.checks": "ALIASES",
        "..base.sampling": "FINISH_MODES LEAST_PENALTY MOVED_MODES",
        "..chunks.context": "CONTEXTS context_name",
        "..finding.common_parts": "WINDOW standing_in",
        "..fusion.answer": "last_answer",
        "..prompt.layout": "MOST_PARTIAL share_of",
        "..prompt.messages": "Prompt check_template_kwargs",
        "..prompt.segments": "check_messages chunk_texts normalise_chunk",
        "..prompt.tools": "as_name as_object check_tools past_calls with_whole_characters",
        "aio": "answer_in_thread iterate_in_thread",
        "finishing": "final_events telemetry token_usage",
        "forced_tools": "SCHEMA_OF_CALLS allowed_tools can_constrain forced_tool uses_tools with_tool_choice",
        "neutral": "IGNORED NEUTRAL changes_nothing is_neutral says_nothing",
        "page": "html_table whole_page",
        "precomputing": "PrecomputeCost all_stored precompute_cost precompute_in_batches",
        "remote": "RemoteEngine",
        "served": "ServedFields",
        "settings": "EngineFields ModelFields Tokenizer",
    },
)
