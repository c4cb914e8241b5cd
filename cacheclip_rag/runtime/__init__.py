"""Running a model: the protocol, and its implementations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from ..base.clock import PhaseClock as PhaseClock
    from .base import (
        DTYPES as DTYPES,
        KVMatch as KVMatch,
        KVPart as KVPart,
        KVRun as KVRun,
        KVSource as KVSource,
        Message as Message,
        Runtime as Runtime,
        State as State,
        TokenizedText as TokenizedText,
    )
    from .kv_blocks import SIZE as SIZE, fingerprints as fingerprints
    from .markers import (
        CALL_MARKERS as CALL_MARKERS,
        REASONING_MARKERS as REASONING_MARKERS,
        known_reasoning as known_reasoning,
        markers_among as markers_among,
    )
    from .slices import Slices as Slices
    from .transformers.chat_template import render_chat_template as render_chat_template
    from .transformers.constraint import Grammars as Grammars, SchemaConstraint as SchemaConstraint
    from .transformers.rotary import Tables as Tables, rotate as rotate
    from .transformers.text import (
        ChatText as ChatText,
        TextModel as TextModel,
        check_encodable as check_encodable,
        check_process as check_process,
        quiet_transformers as quiet_transformers,
    )
    from .transformers.weight_files import check_tensors as check_tensors, copy_mapped as copy_mapped


__getattr__, __all__ = late_names(
    __name__,
    {
        "..base.clock": "PhaseClock",
        "base": "DTYPES KVMatch KVPart KVRun KVSource Message Runtime State TokenizedText",
        "kv_blocks": "SIZE fingerprints",
        "markers": "CALL_MARKERS REASONING_MARKERS known_reasoning markers_among",
        "slices": "Slices",
        "transformers.chat_template": "render_chat_template",
        "transformers.constraint": "Grammars SchemaConstraint",
        "transformers.rotary": "Tables rotate",
        "transformers.text": "ChatText TextModel check_encodable check_process quiet_transformers",
        "transformers.weight_files": "check_tensors copy_mapped",
    },
)
