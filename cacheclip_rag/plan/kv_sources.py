"""Sources of a prompt's KV: stored chunks, the auxiliary model, the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chunks.caches import ChunkCaches
    from ..methods.base import Method
    from ..prompt.layout import Layout, Span
    from ..runtime.kept_kv import KVMatch
    from ..runtime.transformers.prefix_cache import PrefixCache
    from ..selection.auxiliary_pass import AuxiliaryPass


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

    def shares_prefixes(self, method: Method, layout: Layout) -> bool:
        """Whether the method shares prefixes, and its KV is valid for every prompt with the same first tokens."""
        runtime = self.primary.runtime
        is_same = runtime.keeps_prefixes and layout.num_tokens <= runtime.reuse_tokens
        return is_same and method.reuses_prefixes

    def match(self, method: Method, layout: Layout, *, continued: bool = False) -> KVMatch:
        """The prompt's longest beginning in the prefix cache, without its last token, whose logits are needed; with
        ``continued``, also of the continued KV, which is approximate, where that goes on further."""
        ids = layout.token_ids[:-1] if self.shares_prefixes(method, layout) else ()
        exact = self.prefix_cache.match(ids)
        return self.prefix_cache.continued.match(method, ids, exact) if continued else exact
