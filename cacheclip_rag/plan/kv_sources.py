"""Sources of a prompt's KV: stored chunks, the auxiliary model, the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chunks.caches import ChunkCaches
    from ..prompt.layout import Span
    from ..runtime.transformers.continued import ContinuedMatch
    from ..runtime.transformers.prefix_cache import Match, PrefixCache
    from ..selection.auxiliary_pass import AuxiliaryPass
    from .plan import Plan


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVSources:
    """The parts of an engine that one method needs."""

    primary: ChunkCaches
    """Chunk caches of the primary model with the method's chunk context."""
    prefix_caches: ChunkCaches
    """Chunk caches of the primary model with context ``prefix``; they hold the shared prefix's KV."""
    auxiliary: AuxiliaryPass | None
    """None if the method needs no auxiliary model."""
    prefix_cache: PrefixCache
    """Exact KV of the first tokens of earlier prompts, and continued KV, which is approximate."""

    def held(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The chunk spans whose KV is stored for every model that the method needs."""
        caches = [self.primary, *([self.auxiliary.caches] if self.auxiliary is not None else [])]
        held = {span.whole for span in spans}
        for each in caches:
            held = each.held(held)
        return tuple(span for span in spans if span.whole in held)

    def shares_prefixes(self, plan: Plan) -> bool:
        """Whether the method shares prefixes, and its KV is valid for every prompt with the same first tokens."""
        runtime = self.primary.runtime
        is_same = runtime.keeps_prefixes and plan.layout.num_tokens <= runtime.reuse_tokens
        return is_same and plan.method.reuses_prefixes

    def match(self, plan: Plan, *, usable: bool = True) -> Match:
        """The prompt's longest prefix in the prefix cache, without its last token, whose logits are needed. None of it
        is ``usable`` for a method whose positions differ from the prompt's."""
        return self.prefix_cache.match(self._shareable(plan) if usable else ())

    def known_tokens(self, plan: Plan) -> tuple[int, int]:
        """Numbers of tokens that :meth:`match` and :meth:`continued_match` would match now."""
        ids = self._shareable(plan)
        return self.prefix_cache.known(ids), self.prefix_cache.continued.known(plan.method, ids)

    def continued_match(self, plan: Plan) -> ContinuedMatch:
        """The prompt's longest beginning in the continued KV, which is approximate, without its last token; its first
        tokens are from the prefix cache as far as that holds them."""
        ids = self._shareable(plan)
        return self.prefix_cache.continued.match(plan.method, ids, self.prefix_cache.match(ids))

    def _shareable(self, plan: Plan) -> tuple[int, ...]:
        return plan.layout.token_ids[:-1] if self.shares_prefixes(plan) else ()
