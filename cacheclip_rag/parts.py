"""What an engine is made of, each part made at first use: store, models, chunk caches, head sets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path
from typing import cast

from .chunks.caches import ChunkCaches
from .chunks.captured import CapturedChunks
from .chunks.context import CONTEXTS, ChunkContext
from .chunks.library import ChunkLibrary
from .chunks.prefix_cache import PrefixCache
from .chunks.sources import Sources
from .config import EngineConfig
from .errors import ConfigurationError, ModelError
from .guards.certificate import Identity, identity_of
from .methods.base import Method
from .models.load import load_any
from .prompt.segments import PromptReader
from .runtime.base import Runtime
from .runtime.transformers.model import ModelRuntime
from .selection.heads import HeadSet, find_head_set, load_named
from .selection.scoring import AuxiliaryScorer
from .store import ChunkStore

__all__ = ["Parts"]

logger = logging.getLogger(__name__)

PREFIX = CONTEXTS["prefix"]
"""The chunk context that is the shared prefix alone."""


class Parts:
    """Safe to share between threads. Weights load when a model is first asked for."""

    def __init__(self, config: EngineConfig, store: ChunkStore | None = None) -> None:
        """``store``: takes the place of the one that the settings describe."""
        self.config = config
        self.captured = CapturedChunks()
        """Chunk caches captured from answered prompts, in memory, for methods that use them."""
        self.prefixes = PrefixCache(config.prefix_cache_bytes, extra_keys=(config.namespace,))
        """Exact KV of the starts of earlier prompts, in memory."""
        self._lock = threading.RLock()
        self._caches: dict[tuple[str, ChunkContext], ChunkCaches] = {}
        self._store = store
        self._library: ChunkLibrary | None = None
        self._sources: dict[Hashable, Sources] = {}
        self._heads: tuple[HeadSet | None] | None = None
        self._named_heads: dict[str, HeadSet] = {}

    # -- store --------------------------------------------------------------------------------------------------

    @property
    def store(self) -> ChunkStore:
        """The chunk-cache store: memory only, disk, or memory before disk, as configured."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    def _make_store(self) -> ChunkStore:
        config = self.config
        folder = Path(config.store) if config.store else None
        return ChunkStore.open(folder, config.max_bytes, config.memory_bytes)

    @property
    def library(self) -> ChunkLibrary:
        """Which texts were precomputed in this namespace, and where they come from if that was said."""
        with self._lock:
            if self._library is None:
                self._library = ChunkLibrary(self.store, self.config.namespace)
            return self._library

    def close(self) -> None:
        """Release file handles and memory; the parts may be used again afterwards."""
        self.store.close()
        self.prefixes.clear()
        self.captured.clear()

    # -- models -------------------------------------------------------------------------------------------------

    def primary(self, context: ChunkContext) -> ChunkCaches:
        """Chunk caches of the primary model, computed behind ``context``; loads the model."""
        return self._caches_of(self.config.primary, context)

    @property
    def prefix_caches(self) -> ChunkCaches:
        """Chunk caches of the primary model right behind the shared prefix, and the KV of that prefix itself."""
        return self.primary(PREFIX)

    @property
    def auxiliary(self) -> ChunkCaches | None:
        """Chunk caches of the auxiliary model; loads the model. None if there is none."""
        return self._caches_of(self.config.auxiliary, PREFIX) if self.config.auxiliary else None

    @property
    def auxiliary_caches(self) -> ChunkCaches:
        """Chunk caches of the auxiliary model, of an engine that has one."""
        caches = self.auxiliary
        assert caches is not None, "asked for the caches of an auxiliary model that there is not"
        return caches

    def chunk_caches(self, context: ChunkContext, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Where the KV of a chunk is kept, model by model, the primary's first; loads the models."""
        auxiliary = self.auxiliary if with_auxiliary else None
        return [self.primary(context), *([auxiliary] if auxiliary is not None else [])]

    def usable(self, context: ChunkContext) -> Iterator[ChunkCaches]:
        """The primary's caches, then the auxiliary's unless that model cannot be had: other methods work without."""
        yield self.primary(context)
        try:
            auxiliary = self.auxiliary
        except ModelError as error:
            logger.warning("going on without the auxiliary model: %s", error)
            return
        if auxiliary is not None:
            yield auxiliary

    def reader(self) -> PromptReader:
        """Reads prompts for the primary model."""
        return PromptReader(self.prefix_caches.runtime, self.config.system_prompt)

    def _caches_of(self, name: str, context: ChunkContext) -> ChunkCaches:
        with self._lock:
            role = "primary" if name == self.config.primary else "auxiliary"
            if (role, context) not in self._caches:
                self._caches[role, context] = self._make_caches(name, role, context)
            return self._caches[role, context]

    def _make_caches(self, name: str, role: str, context: ChunkContext) -> ChunkCaches:
        config = self.config
        device = config.device if role == "primary" else config.auxiliary_device or config.device
        runtime = load_any(name, dtype=config.dtype, device=device, fallback=config.fallback)
        return ChunkCaches(
            runtime,
            self.store,
            prefix_ids=PromptReader(runtime, config.system_prompt).prefix_ids(),
            namespace=config.namespace,
            codec=(config.codec or config.dtype) if role == "primary" else config.auxiliary_codec,
            context=context,
        )

    # -- head sets ----------------------------------------------------------------------------------------------

    @property
    def scoring_auxiliary(self) -> ModelRuntime | None:
        """The auxiliary model, if there is one whose attention can score."""
        caches = self.auxiliary
        if caches is None or not (caches.runtime.can_reuse and caches.runtime.can_score):
            return None
        return cast(ModelRuntime, caches.runtime)

    @property
    def head_set(self) -> HeadSet | None:
        """Which heads of the auxiliary score, as the settings ask for it; read once."""
        with self._lock:
            if self._heads is None:
                setting, found = str(self.config.heads), None
                if setting != "none" and (auxiliary := self.scoring_auxiliary) is not None:
                    found = find_head_set(setting, auxiliary, self.prefix_caches.runtime.fingerprint)
                self._heads = (found,)
            return self._heads[0]

    def use_heads(self, heads: HeadSet | None) -> None:
        """Have the auxiliary score by these heads from now on, whatever the settings say; None: by its last layer.

        Raises:
            ConfigurationError: there is no auxiliary model.
            ModelError: they were made for another model.
        """
        if heads is not None:
            if self.auxiliary is None:
                raise ConfigurationError("a head set is for an auxiliary model, and there is none. Set auxiliary.")
            heads.check(self.auxiliary.runtime)
        with self._lock:
            self._heads = (heads,)
            self._sources.clear()

    def named_heads(self, names: Collection[str]) -> dict[str, HeadSet]:
        """The head sets that a method asks for by name or file, each read once; empty where nothing can be scored.

        Raises:
            ModelError: there is none of that name, or it cannot be read, or was made for another model.
        """
        auxiliary = self.scoring_auxiliary
        if auxiliary is None:
            return {}
        with self._lock:
            for name in names:
                if name not in self._named_heads:
                    found = load_named(name)
                    found.check(auxiliary, name)
                    self._named_heads[name] = found
            return {name: self._named_heads[name] for name in names}

    @property
    def has_head_set(self) -> bool:
        """False too where the auxiliary cannot be had, or the primary has no KV to be chosen from. A head set that
        cannot be read is an error."""
        config = self.config
        if not config.auxiliary or config.heads == "none" or not self.prefix_caches.runtime.can_reuse:
            return False
        try:
            _ = self.auxiliary
        except ModelError:
            return False
        return self.head_set is not None

    # -- methods ------------------------------------------------------------------------------------------------

    @property
    def default_context(self) -> ChunkContext:
        """What chunks are computed behind unless a method says otherwise."""
        return CONTEXTS[self.config.chunk_context]

    def scorer_of(self, method: Method | None) -> AuxiliaryScorer | None:
        """The auxiliary model as the method needs it; None if it needs none."""
        if method is None or not method.needs_auxiliary or (auxiliary := self.auxiliary) is None:
            return None
        return AuxiliaryScorer(auxiliary, self.head_set, self.named_heads(method.head_sets))

    def sources(self, method: Method | None) -> Sources:
        """Where a method's KV comes from; loads the models it needs."""
        wants: Hashable = None
        if method is not None:
            wants = (method.context, method.needs_auxiliary, frozenset(method.head_sets), method.captures)
        with self._lock:
            if wants not in self._sources:
                self._sources[wants] = self._make_sources(method)
            return self._sources[wants]

    def _make_sources(self, method: Method | None) -> Sources:
        context = (method.context if method is not None else None) or self.default_context
        return Sources(
            primary=self.primary(context),
            prefix=self.prefix_caches,
            auxiliary=self.scorer_of(method),
            captured=self.captured if method is not None and method.captures else None,
            prefixes=self.prefixes,
        )

    def identity(self, method: Method) -> Identity:
        """What a certificate must be about to cover these models with this method."""
        return identity_of(self.config, method, self.prefix_caches, self.scorer_of(method))

    def runtime(self, role: str = "primary") -> Runtime | None:
        """The running model of a role."""
        caches = self.prefix_caches if role == "primary" else self.auxiliary
        return caches.runtime if caches is not None else None
