"""What measurements need of an engine: prefills and their logits, answers read along, comparisons.

:meth:`~cacheclip_rag.engine.CacheClipEngine.prefill` gives a :class:`Prefilled`: logits of the prompt's last token, and
the KV from which :func:`greedy` decodes and :func:`read_along` reads a given answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.names import late_names

if TYPE_CHECKING:
    from ..answering.prefill import Prefilled as Prefilled, confidence as confidence
    from ..answering.ratios import RatioChooser as RatioChooser
    from ..base.clock import PHASES as PHASES
    from ..base.machine import processor_name as processor_name
    from ..chunks.caches import ChunkCaches as ChunkCaches
    from ..guards.certificates import Certificates as Certificates
    from ..guards.fidelity import greedy as greedy, kl_divergence as kl_divergence, read_along as read_along
    from ..plan.plan import KVSources as KVSources, Prediction as Prediction
    from ..prompt.known_kv import choose_rows as choose_rows, known_kv as known_kv
    from ..prompt.layout import lay_out as lay_out
    from ..prompt.segments import segment_text as segment_text
    from ..runtime.transformers.attention_pattern import Block as Block, Probe as Probe
    from ..runtime.transformers.cache import FusedCache as FusedCache, cache_argument as cache_argument
    from ..runtime.transformers.model import ModelRuntime as ModelRuntime
    from ..runtime.transformers.twin import (
        fill_weights as fill_weights,
        shrunk_config as shrunk_config,
        tiny_model as tiny_model,
    )
    from ..selection.auxiliary_pass import pack_chunks as pack_chunks, question_ids as question_ids
    from .engines import (
        auxiliary_caches as auxiliary_caches,
        prefix_caches as prefix_caches,
        stock_attention as stock_attention,
        use_heads as use_heads,
    )


__getattr__, __all__ = late_names(
    __name__,
    {
        "..answering.prefill": "Prefilled confidence",
        "..answering.ratios": "RatioChooser",
        "..base.clock": "PHASES",
        "..base.machine": "processor_name",
        "..chunks.caches": "ChunkCaches",
        "..guards.certificates": "Certificates",
        "..guards.fidelity": "greedy kl_divergence read_along",
        "..plan.plan": "KVSources Prediction",
        "..prompt.known_kv": "choose_rows known_kv",
        "..prompt.layout": "lay_out",
        "..prompt.segments": "segment_text",
        "..runtime.transformers.attention_pattern": "Block Probe",
        "..runtime.transformers.cache": "FusedCache cache_argument",
        "..runtime.transformers.model": "ModelRuntime",
        "..runtime.transformers.twin": "fill_weights shrunk_config tiny_model",
        "..selection.auxiliary_pass": "pack_chunks question_ids",
        "engines": ("auxiliary_caches prefix_caches stock_attention use_heads"),
    },
)
