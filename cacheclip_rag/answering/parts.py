"""Parts of an engine, each made at first use: store, models, chunk caches, head sets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch

from ..base.errors import ConfigurationError, ModelError
from ..base.machine import unit_name
from ..chunks.caches import ChunkCaches
from ..chunks.context import CONTEXTS, ChunkContext
from ..chunks.library import ChunkLibrary
from ..config import EngineConfig
from ..guards.certificate import Identity, confidence_at, find_certificate, identity_of, no_confidence, verdict_at
from ..methods.base import Method
from ..models.load import check_name, load_any
from ..models.memory import free_bytes
from ..plan.sources import Sources
from ..prompt.messages import Prompt
from ..prompt.segments import Fresh, PromptReader, Segment, segment_text
from ..runtime.base import Runtime
from ..runtime.transformers.model import ModelRuntime
from ..runtime.transformers.prefix_cache import PrefixCache
from ..selection.heads import HeadSet, find_head_set, load_named
from ..selection.scoring import AuxiliaryScorer
from ..store import ChunkStore, ReadBuffer, TenantStore, TierStats
from ..timing.controller import Controller, Profile, find_profile

__all__ = ["Parts"]

logger = logging.getLogger(__name__)

PREFIX = CONTEXTS["prefix"]
"""The chunk context ``prefix``: the shared prefix only."""
_MOST_IN_PAGE_CACHE = 1 << 30
"""Most bytes that :meth:`Parts.read_hot` reads without a memory tier."""


class Parts:
    """Parts of one engine. Weights load when a model is first used. Safe to share between threads."""

    def __init__(
        self,
        config: EngineConfig,
        store: ChunkStore | None = None,
        load_primary: Callable[..., Runtime] | None = None,
    ) -> None:
        """
        Args:
            store: used instead of the store in the settings.
            load_primary: called with the primary's name and ``dtype=…``, instead of loading its weights.
        """
        self.config = config
        self._load_primary = load_primary
        self.prefixes = PrefixCache(config.prefix_cache_bytes, extra_keys=(config.namespace,))
        """Exact KV of the first tokens of earlier prompts, in memory."""
        self._lock = threading.RLock()
        self._caches: dict[tuple[str, ChunkContext], ChunkCaches] = {}
        self._store = store
        self._tenant: TenantStore | None = None
        self._library: ChunkLibrary | None = None
        self._sources: dict[Hashable, Sources] = {}
        self._heads: tuple[HeadSet | None] | None = None
        self._named_heads: dict[str, HeadSet] = {}
        self._controllers: dict[str, Controller | None] = {}
        self._confidences: dict[tuple[str, bool], float] = {}

    # -- store --------------------------------------------------------------------------------------------------

    @property
    def store(self) -> TenantStore:
        """This namespace's part of the chunk-cache store: memory only, disk, or memory before disk, as configured."""
        with self._lock:
            if self._tenant is None:
                config = self.config
                folder = Path(config.store) if config.store else None
                store = self._store or ChunkStore.open(folder, config.max_bytes, config.memory_bytes)
                self._tenant = TenantStore(store, config.namespace)
            return self._tenant

    def read_hot(self) -> tuple[int, int]:
        """Read the tenant's most recently used entries: as many as fit into the memory tier (``memory_bytes``), or
        without one up to 1 GiB, and at most half of the free memory, so that the system's page cache has them.

        Returns:
            Number of entries, and their bytes in the store. Zeros without a folder.
        """
        store, room = self.store, 0
        if self.config.store:
            free = free_bytes("cpu")
            most = _MOST_IN_PAGE_CACHE if free is None else min(_MOST_IN_PAGE_CACHE, free // 2)
            room = self.config.memory_bytes or most
        chosen: list[str] = []
        taken = 0
        for key in reversed(store.catalog.keys(self.config.namespace)) if room else ():
            entry = store.catalog.entry(self.config.namespace, key)
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
            return self._tenant.store.stats().tiers if self._tenant is not None else ()

    @property
    def library(self) -> ChunkLibrary:
        """Precomputed texts of this namespace and their sources."""
        with self._lock:
            if self._library is None:
                self._library = ChunkLibrary(self.store)
            return self._library

    def close(self) -> None:
        """Close file handles and free memory; the parts may be used again afterwards."""
        if self._tenant is not None:
            self._tenant.close()
        self.prefixes.clear()

    # -- models -------------------------------------------------------------------------------------------------

    def primary(self, context: ChunkContext) -> ChunkCaches:
        """Chunk caches of the primary model with chunk context ``context``. Loads the model."""
        return self._caches_of("primary", context)

    @property
    def prefix_caches(self) -> ChunkCaches:
        """Chunk caches of the primary model with chunk context ``prefix``, including the shared prefix's KV."""
        return self.primary(PREFIX)

    @property
    def auxiliary(self) -> ChunkCaches | None:
        """Chunk caches of the auxiliary model; None if no auxiliary is set. Loads the model. A primary that is its own
        auxiliary is loaded once more if this process has no weights of it: scores need them."""
        config = self.config
        is_own = config.auxiliary == config.primary and self._load_primary is None
        return self._caches_of("primary" if is_own else "auxiliary", PREFIX) if config.auxiliary else None

    @property
    def auxiliary_caches(self) -> ChunkCaches:
        """Chunk caches of the auxiliary model, which must be set."""
        caches = self.auxiliary
        assert caches is not None, "auxiliary_caches needs an engine with an auxiliary model"
        return caches

    def chunk_caches(self, context: ChunkContext, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Chunk caches of each model, the primary's first. Loads the models."""
        auxiliary = self.auxiliary if with_auxiliary else None
        return [self.primary(context), *([auxiliary] if auxiliary is not None else [])]

    def usable(self, context: ChunkContext) -> Iterator[ChunkCaches]:
        """The primary's caches, then the auxiliary's. If the auxiliary cannot be loaded, its caches are left out with a
        warning, because other methods work without them."""
        yield self.primary(context)
        try:
            auxiliary = self.auxiliary
        except ModelError as error:
            logger.warning("continuing without the auxiliary model: %s", error)
            return
        if auxiliary is not None:
            yield auxiliary

    def segment(
        self,
        prompt: Prompt,
        documents: Iterable[str] = (),
        *,
        date: str | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        parts: bool = True,
    ) -> list[Segment]:
        """Cut a prompt for the primary model into stored chunks and fresh text; see :class:`PromptReader`."""
        reader = PromptReader(self.prefix_caches.runtime, self.config.system_prompt)
        return reader.segments(prompt, self.library.index, documents, date=date, tools=tools, parts=parts)

    def segment_as_it_stands(self, text: str, documents: Iterable[str] = (), *, parts: bool = True) -> list[Segment]:
        """Cut a text without chat template and system prompt into stored chunks and fresh text."""
        runtime = self.prefix_caches.runtime
        opening: list[Segment] = [Fresh(runtime.opening, control=True)] if runtime.opening else []
        return opening + segment_text(text, self.library.index, documents, parts=parts and runtime.has_offsets)

    def _caches_of(self, role: str, context: ChunkContext) -> ChunkCaches:
        """``role``: ``primary`` or ``auxiliary``."""
        with self._lock:
            if (role, context) not in self._caches:
                self._caches[role, context] = self._make_caches(role, context)
            return self._caches[role, context]

    def _make_caches(self, role: str, context: ChunkContext) -> ChunkCaches:
        config = self.config
        name = config.primary if role == "primary" else config.auxiliary
        assert name is not None, "an auxiliary that is asked for is set"
        device = config.device if role == "primary" else config.auxiliary_device or config.device
        for each in filter(None, (config.primary, config.auxiliary)):
            check_name(each)  # of both, before the weights of one are loaded
        if role == "primary" and self._load_primary is not None:
            runtime = self._load_primary(name, dtype=config.dtype)
        else:
            runtime = load_any(name, dtype=config.dtype, device=device)
        return ChunkCaches(
            runtime,
            self.store,
            prefix_ids=PromptReader(runtime, config.system_prompt).prefix_ids(),
            codec=(config.codec or config.dtype) if role == "primary" else config.auxiliary_codec,
            context=context,
        )

    def context(self, given: ChunkContext | None = None) -> ChunkContext:
        """The chunk context of a method.

        Args:
            given: the method's :attr:`~cacheclip_rag.methods.base.Method.context`; None: the engine's setting.
        """
        return given or CONTEXTS[self.config.chunk_context]

    # -- head sets ----------------------------------------------------------------------------------------------

    @property
    def scoring_auxiliary(self) -> ModelRuntime | None:
        """The auxiliary model, if there is one whose attention can score."""
        caches = self.auxiliary
        if caches is None or not caches.runtime.can_score:
            return None
        return cast(ModelRuntime, caches.runtime)

    @property
    def head_set(self) -> HeadSet | None:
        """The auxiliary's head set, for methods that name none; read once."""
        with self._lock:
            if self._heads is None:
                auxiliary = self.scoring_auxiliary
                primary = self.prefix_caches.runtime.fingerprint
                self._heads = (None if auxiliary is None else find_head_set(auxiliary, primary),)
            return self._heads[0]

    def use_heads(self, heads: HeadSet | None) -> None:
        """Use these heads from now on, instead of those that are found; None: the auxiliary's last layer.

        Raises:
            ConfigurationError: no auxiliary model is set.
            ModelError: the heads were made for another model.
        """
        if heads is not None:
            if self.auxiliary is None:
                raise ConfigurationError("a head set needs an auxiliary model, and none is set. Set auxiliary.")
            heads.check(self.auxiliary.runtime)
        with self._lock:
            self._heads = (heads,)
            self._sources.clear()
            self._controllers.clear()
            self._confidences.clear()

    def named_heads(self, names: Collection[str]) -> dict[str, HeadSet]:
        """The head sets that a method names, each read once; empty if no auxiliary model can score.

        Raises:
            ModelError: a head set is missing, cannot be read, or was made for another model.
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
        """Whether a head set can be used. False if the auxiliary cannot be loaded. A head set that cannot be read
        raises an error."""
        if not self.config.auxiliary:
            return False
        try:
            _ = self.auxiliary
        except ModelError:
            return False
        return self.head_set is not None

    # -- methods ------------------------------------------------------------------------------------------------

    def scorer_of(self, method: Method) -> AuxiliaryScorer | None:
        """The auxiliary model with the method's head sets; None if the method needs no auxiliary model."""
        if not method.needs_auxiliary or (auxiliary := self.auxiliary) is None:
            return None
        return AuxiliaryScorer(auxiliary, self.head_set, self.named_heads(method.head_sets))

    def sources(self, method: Method) -> Sources:
        """The sources of a method's KV. Loads the models that the method needs."""
        wants = (method.context, method.needs_auxiliary, frozenset(method.head_sets))
        with self._lock:
            if wants not in self._sources:
                self._sources[wants] = self._make_sources(method)
            return self._sources[wants]

    def _make_sources(self, method: Method) -> Sources:
        return Sources(
            primary=self.primary(self.context(method.context)),
            prefix=self.prefix_caches,
            auxiliary=self.scorer_of(method),
            prefixes=self.prefixes,
        )

    def controller(self, method: Method) -> Controller | None:
        """Chooses ratios of this method by predicted time; None without a profile of these models on this machine, with
        a warning at first. The profile and the certificate are read once."""
        key = _without_ratio(method)
        with self._lock:
            if key not in self._controllers:
                identity = self.profile_identity(method)
                profile = find_profile(identity)
                if profile is None:
                    logger.warning(
                        "the recompute ratio cannot be chosen by predicted time, because these models were not "
                        "profiled on this machine; method %r keeps its own ratio. Run cacheclip profile, or call "
                        "engine.profile_machine().",
                        method.name,
                    )
                self._controllers[key] = None if profile is None else Controller(profile, self._may_be(method))
            return self._controllers[key]

    def use_profile(self, method: Method, profile: Profile) -> None:
        """Choose this method's ratios by ``profile`` from now on."""
        key = _without_ratio(method)
        with self._lock:
            self._controllers[key] = Controller(profile, self._may_be(method))

    def _may_be(self, method: Method) -> Callable[[float], bool] | None:
        """Whether the method's certificate calls a recompute ratio exact or faithful; None without a certificate."""
        certificate, _ = find_certificate(self.identity(method))
        if certificate is None:
            return None
        return lambda ratio: verdict_at(certificate, ratio, method.min_confidence) != "not faithful"

    def certified_confidence(self, method: Method, *, any_ratio: bool = False) -> float:
        """The value of ``min_confidence="auto"``: of the method's ratio, by its certificate, which is read once.

        Args:
            any_ratio: the largest value of all ratios that may be chosen.

        Raises:
            CertificateError: no certificate of these models and this method says it.
        """
        key = repr(method), any_ratio
        with self._lock:
            if key not in self._confidences:
                identity = self.identity(method)
                certificate, why = find_certificate(identity)
                if certificate is not None and certificate.quick:
                    certificate = None  # four prompts say too little
                ratios = [method.nominal_ratio]
                if certificate is not None and any_ratio:
                    ratios += [row.ratio for row in certificate.ratios if row.verdict == "faithful"]
                found = [confidence_at(certificate, ratio) if certificate else None for ratio in ratios]
                known = [each for each in found if each is not None]
                if len(known) < len(found):
                    raise no_confidence(self.config, method, identity, why)
                self._confidences[key] = max(known)
            return self._confidences[key]

    def profile_identity(self, method: Method) -> dict[str, Any]:
        """What a profile needs to hold for these models with this method: weights, settings, versions, processors."""
        runtimes = [self.prefix_caches.runtime, *filter(None, [self.scoring_auxiliary])]
        return {
            **asdict(self.identity(method)),
            "processors": [unit_name(each.device) for each in runtimes],
            "threads": torch.get_num_threads(),
        }

    def identity(self, method: Method) -> Identity:
        """Identity that a certificate needs to cover these models with this method."""
        context = self.context(method.context)
        return identity_of(self.config, method, self.prefix_caches, self.scorer_of(method), context)


def _without_ratio(method: Method) -> str:
    """Equal for a method at any ratio, also for methods that cannot be hashed."""
    return repr(method.at(0.0) if method.has_ratio else method)
