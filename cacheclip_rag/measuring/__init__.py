"""What measurements need of an engine: prefills and their logits, answers read along, comparisons, the identity of what
was measured.

:meth:`~cacheclip_rag.engine.CacheClipEngine.prefill` gives a :class:`Prefilled`: logits of the prompt's last token, and
the KV from which :func:`greedy` decodes and :func:`read_along` reads a given answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.late import late_names

if TYPE_CHECKING:
    from ..answering.prefill import Prefilled
    from ..answering.sampler import confidence
    from ..base.clock import PHASES
    from ..base.machine import processor_name, unit_name
    from ..chunks.caches import ChunkCaches
    from ..fusion.fuse import choose_rows
    from ..guards.fidelity import Fidelity, compare, greedy, kl_divergence, own_answer, read_along
    from ..guards.identity import Identity, differences
    from ..prompt.known_kv import known_kv
    from ..prompt.segments import segment_text
    from ..runtime.transformers.attention_pattern import Probe
    from ..runtime.transformers.cache import FusedCache, cache_argument
    from ..runtime.transformers.model import ModelRuntime
    from ..selection.auxiliary_pass import question_ids
    from ..selection.packed_chunks import pack_chunks
    from ..store.disk import CAN_DROP_PAGE_CACHE
    from ..timing.controller import Controller, find_profile, fit_media
    from ..timing.texts import QUESTION, SECOND_QUESTION, make_texts
    from .engines import (
        auxiliary_caches,
        extending_model,
        identity_of,
        prefix_caches,
        stock_attention,
        transformers_model,
        use_heads,
    )

__all__ = [
    "CAN_DROP_PAGE_CACHE",
    "PHASES",
    "QUESTION",
    "SECOND_QUESTION",
    "ChunkCaches",
    "Controller",
    "Fidelity",
    "FusedCache",
    "Identity",
    "ModelRuntime",
    "Prefilled",
    "Probe",
    "auxiliary_caches",
    "cache_argument",
    "choose_rows",
    "compare",
    "confidence",
    "differences",
    "extending_model",
    "find_profile",
    "fit_media",
    "greedy",
    "identity_of",
    "kl_divergence",
    "known_kv",
    "make_texts",
    "own_answer",
    "pack_chunks",
    "prefix_caches",
    "processor_name",
    "question_ids",
    "read_along",
    "segment_text",
    "stock_attention",
    "transformers_model",
    "unit_name",
    "use_heads",
]

_HOMES = {
    "CAN_DROP_PAGE_CACHE": "..store.disk",
    "ChunkCaches": "..chunks.caches",
    "Controller": "..timing.controller",
    "Fidelity": "..guards.fidelity",
    "FusedCache": "..runtime.transformers.cache",
    "Identity": "..guards.identity",
    "ModelRuntime": "..runtime.transformers.model",
    "PHASES": "..base.clock",
    "Prefilled": "..answering.prefill",
    "Probe": "..runtime.transformers.attention_pattern",
    "QUESTION": "..timing.texts",
    "SECOND_QUESTION": "..timing.texts",
    "auxiliary_caches": "engines",
    "cache_argument": "..runtime.transformers.cache",
    "choose_rows": "..fusion.fuse",
    "compare": "..guards.fidelity",
    "confidence": "..answering.sampler",
    "differences": "..guards.identity",
    "extending_model": "engines",
    "find_profile": "..timing.controller",
    "fit_media": "..timing.controller",
    "greedy": "..guards.fidelity",
    "identity_of": "engines",
    "kl_divergence": "..guards.fidelity",
    "known_kv": "..prompt.known_kv",
    "make_texts": "..timing.texts",
    "own_answer": "..guards.fidelity",
    "pack_chunks": "..selection.packed_chunks",
    "prefix_caches": "engines",
    "processor_name": "..base.machine",
    "question_ids": "..selection.auxiliary_pass",
    "read_along": "..guards.fidelity",
    "segment_text": "..prompt.segments",
    "stock_attention": "engines",
    "transformers_model": "engines",
    "unit_name": "..base.machine",
    "use_heads": "engines",
}
__getattr__ = late_names(__name__, _HOMES)
