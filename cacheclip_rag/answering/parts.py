"""Parts of an engine, each made at first use: its store, and methods with the sources of their KV."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..base.checks import check_ratio_and_limit
from ..base.guests import measurement
from ..chunks.context import CONTEXTS, ChunkContext
from ..chunks.stored_prompts import StoredPrompts
from ..chunks.texts import ChunkTexts
from ..config import EngineConfig
from ..finding.texts import GivenTexts
from ..guards.certificates import Certificates
from ..methods import DEFAULT_METHOD, check_auxiliary, check_method, check_reads, preset
from ..methods.base import Method
from ..models.load import unload_models
from ..models.memory import free_bytes
from ..plan.plan import KVSources
from ..prompt.layout import check_least_length
from ..prompt.messages import Prompt
from ..prompt.segments import PromptReader, Segment
from ..runtime.base import Runtime
from ..runtime.prompt_cache import PromptCache
from ..selection.engine_head_sets import HeadSets
from ..selection.heads import HeadSet
from ..store import ReadBuffer, TenantStore, TieredStore, TierStats, open_chunk_store
from .models import EngineModels
from .ratios import RatioChooser
from .turns import CALLER

logger = logging.getLogger(__name__)

_MOST_IN_PAGE_CACHE = 1 << 30
"""Most bytes that :meth:`Parts.read_hot` reads without a memory tier."""


class _Needs(NamedTuple):
    """What the sources of a method's KV depend on."""

    context: ChunkContext
    needs_auxiliary: bool
    head_sets: frozenset[str]
    kind: type[Method]
    corrects: bool
    """Of one kind, some methods correct KV and some do not."""


class Parts:
    """Parts of one engine. Weights load when a model is first used. Safe to share between threads."""

    def __init__(
        self,
        config: EngineConfig,
        store: TieredStore | None = None,
        load_primary: Callable[..., Runtime] | None = None,
    ) -> None:
        """``store`` is used instead of the store in the settings; ``load_primary`` is called with the primary's name
        and ``dtype=…``, instead of loading its weights."""
        self.config = config
        self.prompt_cache = PromptCache(config.prefix_cache_bytes)
        """Exact KV of the first tokens of earlier prompts, in memory."""
        self._lock = threading.RLock()
        self._can_gate = load_primary is None
        """Another process gives no logits before its answer."""
        self.models = EngineModels(config, lambda: self.store, self._lock, load_primary)
        """The primary and the auxiliary model, with their chunk caches."""
        self._store = store
        self._tenant: TenantStore | None = None
        self._drops_erased = False
        """Whether the store has :meth:`drop_kv` called."""
        self._kv_sources: dict[_Needs, KVSources] = {}
        self._controllers: RatioChooser | None = None
        self._stored_prompts: StoredPrompts | None = None
        self.head_sets = HeadSets(lambda: self.models.runtime, lambda: self.models.auxiliary_caches)
        """Head sets of the auxiliary model."""
        self.certificates = measurement("certificates", Certificates, config, self.kv_sources)
        """What certificates say about methods with these models."""

    # -- store --------------------------------------------------------------------------------------------------

    @property
    def store(self) -> TenantStore:
        """This namespace's part of the chunk-cache store: memory only, disk, or memory before disk, as configured."""
        with self._lock:
            if self._tenant is None:
                config = self.config
                store = self._store or open_chunk_store(
                    config.store, config.max_bytes, config.memory_bytes, config.codec
                )
                store.tiers.gpu_bytes = config.gpu_bytes
                self._tenant = TenantStore(store, config.namespace)
            if not self._drops_erased:  # at first, and again after it was closed
                self._tenant.chunk_store.erasures.watch(self._tenant.namespace, self)
                self._drops_erased = True
            return self._tenant

    def read_hot(self) -> tuple[int, int]:
        """Read the tenant's most recently used entries: as many as fit into the memory tier (``memory_bytes``), or
        without one up to 1 GiB, and at most half of the free memory, so that the system's page cache has them. Returns
        their number, and their bytes in the store."""
        store, room = self.store, 0
        if self.config.store:
            free = free_bytes("cpu")
            most = _MOST_IN_PAGE_CACHE if free is None else min(_MOST_IN_PAGE_CACHE, free // 2)
            room = self.config.memory_bytes or most
        chosen: list[str] = []
        taken = 0
        for key in reversed(store.catalog.keys(self.config.namespace)) if room else ():
            entry = store.catalog.entries_of(self.config.namespace, [key]).get(key)
            if entry is None:
                continue
            if taken + entry.num_bytes > room:
                break
            chosen.append(key)
            taken += entry.num_bytes
        # the least recently used first, so that the order of use stays
        return sum([store.get(key, ReadBuffer()) is not None for key in reversed(chosen)]), taken

    def tier_stats(self) -> Sequence[TierStats]:
        """Counters of the store's tiers; none before the store's first use."""
        with self._lock:
            return self._tenant.chunk_store.stats().tiers if self._tenant is not None else ()

    @cached_property
    def texts(self) -> ChunkTexts:
        return ChunkTexts(self.store)

    def close(self) -> None:
        if self._stored_prompts is not None:
            while not self._stored_prompts.step():
                pass
        self.drop_kv()
        with self._lock:
            if self._tenant is not None:
                self._tenant.chunk_store.erasures.unwatch(self)
                self._drops_erased = False
                self._tenant.close()

    def drop_kv(self) -> None:
        """Drop KV of earlier prompts and answers, as after an erasure: some may be of a text that is gone. The thread
        that watches for erasures calls it, so it never waits for an answer, nor for this object's lock."""
        self.prompt_cache.clear()
        self.models.drop_kv()

    def drop_erased(self) -> None:
        """Drop KV of earlier prompts and answers after an erasure of this engine."""
        with self._lock:
            tenant = self._tenant
        if tenant is None:
            self.drop_kv()
        else:
            tenant.chunk_store.erasures.drop_own(self)

    def unload(self) -> None:
        """Forget the loaded models and what holds them, and free their memory. The parts may be used again."""
        with self._lock:
            loaded = self.models.forget()
            self._kv_sources.clear()
            self._stored_prompts = None
        self.certificates.forget()
        self._controllers = None
        unload_models(loaded)
        del loaded
        gc.collect()  # hooks and modules refer to one another
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def segment(
        self,
        prompt: Prompt,
        documents: Collection[str] = (),
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        as_it_stands: bool = False,
    ) -> list[Segment]:
        """Cut a prompt for the primary model into stored chunks and fresh text; see :class:`PromptReader`. A text that
        is read ``as_it_stands`` gets no chat template and no system prompt."""
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        texts = [each.get("content") for each in messages if isinstance(each, dict)]
        check_least_length([text for text in texts if isinstance(text, str)], self.models.runtime)
        reader = PromptReader(self.models.runtime, None if as_it_stands else self.config.system_prompt)
        caller, texts_of_call = CALLER.get(), GivenTexts(documents) if documents else ()
        if caller is not None:  # whose search ends when the caller leaves
            texts_of_call = GivenTexts(documents, caller.check)
        return reader.segments(
            prompt,
            self.texts.index,
            texts_of_call,
            date=date,
            tools=tools,
            variables=variables,
            as_it_stands=as_it_stands,
        )

    # -- methods ------------------------------------------------------------------------------------------------

    @property
    def controllers(self) -> RatioChooser:
        """Chooses recompute ratios by predicted time."""
        controllers = self._controllers
        if controllers is None:
            controllers = self._controllers = measurement(
                "ratios",
                RatioChooser,
                self.certificates,
                lambda: [self.models.runtime, *filter(None, [self.head_sets.auxiliary])],
            )
        return controllers

    def choose_method(
        self, method: str | Method | None, recompute_ratio: float | str | None, *, any_ratio: bool = False
    ) -> Method:
        """The method for a call (default the engine's method), at its recompute ratio: default the engine's ratio for
        names and for the engine's method, and the instance's own ratio for an instance. Presets without a ratio ignore
        it. ``auto``: the method's own, until a controller chooses. ``any_ratio``: its ratio is chosen by predicted time
        later. ``auto`` has the gate of :meth:`~cacheclip_rag.guards.certificates.Certificates.gated`, unless the
        settings have one. Raises ConfigurationError: an unknown name; a ratio out of range, or for an instance without
        a ratio; a method that needs an auxiliary model and an engine without one."""
        config = self.config
        named = config.method if method is None else method
        check_method(named)
        check_ratio_and_limit(recompute_ratio, None)
        by_name = method is None or isinstance(method, str)
        wanted = config.recompute_ratio if recompute_ratio is None and by_name else recompute_ratio
        ratio = None if isinstance(wanted, str) else wanted
        is_default = named == DEFAULT_METHOD
        if is_default and self.models.runtime.computed_edges[0]:
            named = "epic"
        elif is_default and self.head_sets.has_default:
            named = "cacheclip"
        elif is_default:
            named = "epic-corrected"
        chosen = preset(named) if isinstance(named, str) else named
        if ratio is not None and (chosen.has_ratio or (recompute_ratio is not None and not isinstance(named, str))):
            chosen = chosen.at(ratio)
        check_auxiliary(chosen, config.auxiliary)
        least = config.min_confidence
        if least is None and is_default and self._can_gate:
            return self.certificates.gated(chosen, ratio is not None, any_ratio=any_ratio)
        if least is None or not by_name or not chosen.reuses_chunks:
            return chosen
        if isinstance(least, str):
            return self.certificates.promised(chosen, ratio is not None, any_ratio=any_ratio)
        return replace(chosen, min_confidence=least)

    def context_of(self, method: str | Method | None = None) -> ChunkContext:
        named = self.config.method if method is None else method
        check_method(named)
        # both methods that auto can mean use the engine's setting
        chosen = preset(named) if isinstance(named, str) and named != DEFAULT_METHOD else named
        own = chosen.context if isinstance(chosen, Method) else None
        return own or CONTEXTS[self.config.chunk_context]

    def kv_sources(self, method: Method) -> KVSources:
        """The sources of a method's KV. Loads the models that the method needs."""
        context = self.context_of(method)
        needs = _Needs(
            context, method.needs_auxiliary, frozenset(method.head_sets), type(method), bool(method.mean_change)
        )
        with self._lock:
            if not self._drops_erased:
                _ = self.store  # opens it, and watches for erasures again
            if needs not in self._kv_sources:
                check_reads(method, self.models.primary_caches(context).runtime)
                if self.config.store_prompts and self._stored_prompts is None:
                    self._stored_prompts = StoredPrompts(self.models.caches_after_prefix, self.prompt_cache)
                self._kv_sources[needs] = KVSources(
                    primary=self.models.primary_caches(context),
                    prefix_caches=self.models.caches_after_prefix,
                    auxiliary=self.head_sets.auxiliary_pass(method.head_sets) if method.needs_auxiliary else None,
                    prompt_cache=self.prompt_cache,
                    stored_prompts=self._stored_prompts,
                )
            return self._kv_sources[needs]

    def use_heads(self, heads: HeadSet | None) -> None:
        """Use these heads from now on, and forget what was decided with others; see :meth:`HeadSets.use`."""
        self.head_sets.use(heads)
        with self._lock:
            self._kv_sources.clear()
        # from below to above, so that nothing that was read before is kept above
        self.certificates.forget()
        self._controllers = None
