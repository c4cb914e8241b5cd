"""The models of an engine and their chunk caches, each loaded at first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

from ..base.errors import ConfigurationError, ModelError
from ..chunks.caches import ChunkCaches
from ..chunks.context import CONTEXTS, ChunkContext
from ..config import EngineConfig
from ..models.devices import choose_device
from ..models.load import check_name, concrete, load_any, loader_of
from ..prompt.segments import PromptReader
from ..runtime.base import Runtime
from ..store import TenantStore

logger = logging.getLogger(__name__)

PREFIX = CONTEXTS["prefix"]
"""The chunk context ``prefix``: the shared prefix only."""
_SHOWS_NO_SCORES = (
    "auxiliary must be a model whose attention scores tokens, and what runs {name!r} does not show it. Give one that "
    "transformers runs and that has no recurrent layers, or None for methods that need no auxiliary."
)


class EngineModels:
    """The primary and the auxiliary model of one engine, with their chunk caches by chunk context."""

    def __init__(
        self,
        config: EngineConfig,
        store: Callable[[], TenantStore],
        lock: AbstractContextManager[object],
        load_primary: Callable[..., Runtime] | None = None,
    ) -> None:
        """``lock`` is held while a model loads, and may be taken again by ``store``. ``load_primary`` is called with
        the primary's name and ``dtype=…``, instead of loading its weights."""
        self._config, self._store, self._lock, self._load_primary = config, store, lock, load_primary
        self._caches: dict[tuple[str, ChunkContext], ChunkCaches] = {}

    def primary_caches(self, context: ChunkContext) -> ChunkCaches:
        """Chunk caches of the primary model with chunk context ``context``. Loads the model."""
        return self._caches_of("primary", context)

    @property
    def caches_after_prefix(self) -> ChunkCaches:
        """Chunk caches of the primary model with chunk context ``prefix``; they hold the shared prefix's KV."""
        return self.primary_caches(PREFIX)

    @cached_property
    def runtime(self) -> Runtime:
        """The primary model; loads it."""
        return self.caches_after_prefix.runtime

    @property
    def auxiliary_caches(self) -> ChunkCaches | None:
        """Chunk caches of the auxiliary model; None if no auxiliary is set. Loads the model. They are always
        computed after the shared prefix, whatever ``chunk_context`` is."""
        role = self._auxiliary_role
        caches = self._caches_of(role, PREFIX) if role else None
        if caches is not None and caches.runtime.computed_edges[0]:
            raise ConfigurationError(_SHOWS_NO_SCORES.format(name=self._config.auxiliary))
        return caches

    @cached_property
    def _auxiliary_role(self) -> str | None:
        """A primary that is its own auxiliary is loaded once more if this process has no weights of it: scores need
        them."""
        config = self._config
        if config.auxiliary and not loader_of(config.auxiliary).can_score:
            raise ConfigurationError(_SHOWS_NO_SCORES.format(name=config.auxiliary))
        is_own = config.auxiliary == config.primary and self._load_primary is None
        return config.auxiliary and ("primary" if is_own else "auxiliary")

    def chunk_caches(self, context: ChunkContext, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Chunk caches of each model, the primary's first. Loads the models."""
        auxiliary = self.auxiliary_caches if with_auxiliary else None
        return [self.primary_caches(context), *([auxiliary] if auxiliary is not None else [])]

    def usable(self, context: ChunkContext) -> Iterator[ChunkCaches]:
        """The primary's caches, then the auxiliary's. If the auxiliary cannot be loaded, its caches are left out with a
        warning, because other methods work without them."""
        yield self.primary_caches(context)
        try:
            auxiliary = self.auxiliary_caches
        except ModelError as error:
            logger.warning("continuing without the auxiliary model: %s", error)
            return
        if auxiliary is not None:
            yield auxiliary

    def drop_kv(self) -> None:
        """Forget texts, and KV that nobody uses. Waits for no answer, and for no lock."""
        for caches in [*self._caches.values()]:
            caches.forget_texts()
        for runtime in {id(caches.runtime): caches.runtime for caches in [*self._caches.values()]}.values():
            runtime.drop_freed_kv()

    def forget(self) -> list[Runtime]:
        """Forget the loaded models, which it returns. They are loaded again when they are needed."""
        with self._lock:
            loaded = [caches.runtime for caches in self._caches.values()]
            self._caches.clear()
            vars(self).pop("runtime", None)
        return loaded

    def _caches_of(self, role: str, context: ChunkContext) -> ChunkCaches:
        """``role``: ``primary`` or ``auxiliary``."""
        with self._lock:
            if (role, context) not in self._caches:
                self._caches[role, context] = self._make_caches(role, context)
            return self._caches[role, context]

    def _make_caches(self, role: str, context: ChunkContext) -> ChunkCaches:
        for each in filter(None, (self._config.primary, self._config.auxiliary)):
            check_name(each)  # of both, before the weights of one are loaded
        config, is_primary = self._config, role == "primary"
        config = concrete(replace(config, codec=config.codec or self._store().chunk_store.codec))
        name = config.primary if is_primary else config.auxiliary
        assert name is not None, "an auxiliary that is asked for is set"
        device = config.device if is_primary else choose_device(config.auxiliary_device or config.device)
        if is_primary and self._load_primary is not None:
            runtime = self._load_primary(name, dtype=config.dtype)
        else:
            try:
                runtime = load_any(name, dtype=config.dtype, device=device)
            except ModelError as error:
                if role == "auxiliary":
                    error.args = (f"{error} Some methods need no auxiliary model: auxiliary=None, --auxiliary none.",)
                raise
        return ChunkCaches(
            runtime,
            self._store(),
            prefix_ids=PromptReader(runtime, config.system_prompt).prefix_ids(),
            codec=runtime.kv_codec or ((config.codec or config.dtype) if role == "primary" else config.auxiliary_codec),
            context=context,
        )
