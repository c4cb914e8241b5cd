"""Says once that a store was of no use to a prompt, and why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .base import Observer

if TYPE_CHECKING:
    from ..plan.plan import KVSources, Plan

logger = logging.getLogger(__name__)


_LEAST_TOKENS = 128
"""Least tokens after the shared prefix of a prompt that probably holds retrieved text."""


_HOOKS = (
    "CacheClipTransform.from_llm(llm) as the last transformation in LlamaIndex, CacheClipVectorStore(store, llm) in "
    "LangChain, cacheclip ingest, or engine.precompute(texts)"
)


class MissWarning(Observer):
    """Warns at the first prompt that seems to hold chunks and reuses nothing: because nothing is stored, or although
    the store has chunks.

    A prompt seems to hold chunks if texts are known to be in it, documents were given with it, or it is long. A
    greeting, or a question without context, does not."""

    def __init__(self) -> None:
        self._warned = self._warned_of_nothing = False

    def on_plan(self, plan: Plan, kv_sources: KVSources) -> None:
        if self._warned or plan.reused or plan.fallback is None or plan.obstructed:
            return
        if not _seems_to_hold_chunks(plan):
            return
        if not kv_sources.primary.store.has_texts:
            self._say_that_nothing_is_stored(plan)
            return
        self._warned = True
        not_found = f", and {plan.not_found} given documents are not in it" if plan.not_found else ""
        logger.warning(
            "a prompt reuses nothing of this store, and is answered by plain prefill: %s%s. 'cacheclip explain-miss' "
            "compares a prompt with the stored texts. This is said once.",
            plan.fallback,
            not_found,
        )

    def _say_that_nothing_is_stored(self, plan: Plan) -> None:
        if self._warned_of_nothing or plan.layout.chunks:  # documents that were given are stored after the answer
            return
        self._warned_of_nothing = True
        logger.warning(
            "nothing is precomputed, so that this prompt of %d tokens reuses nothing and is no faster. Precompute texts"
            " once where you index them: %s. This is said once.",
            plan.layout.num_tokens,
            _HOOKS,
        )


def _seems_to_hold_chunks(plan: Plan) -> bool:
    layout = plan.layout
    return bool(layout.chunks or plan.not_found) or layout.num_tokens - layout.num_prefix >= _LEAST_TOKENS
