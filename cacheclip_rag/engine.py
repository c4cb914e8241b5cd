"""The engine, the main class of the public API.

:mod:`cacheclip_rag.answering.pipeline` answers questions, :mod:`cacheclip_rag.answering.writer` stores chunks, and
:mod:`cacheclip_rag.answering.parts` holds store, models and caches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Unpack

from .answering.options import CallKeywords, CallOptions, Request
from .answering.parts import Parts
from .answering.pipeline import Answering
from .answering.prefill import Prefilled
from .answering.writer import ChunkWriter
from .base.checks import AUTO_RATIO
from .base.closing import Closing
from .base.errors import CacheClipError
from .base.sampling import SamplingParams
from .chunks.caches import ChunkCaches
from .chunks.context import ChunkContext
from .chunks.texts import ChunkTexts
from .config import EngineConfig
from .fusion.answer import Answer, Event
from .guards.base import Observer, brought_observers
from .guards.metrics import Metrics
from .guards.misses import MissWarning
from .guards.shadow import ShadowChecker
from .guards.tracing import Tracing, is_traced
from .methods.base import Method
from .plan.plan import Plan
from .prompt.messages import Documents, Prompt, check_template_kwargs
from .prompt.segments import Segment, given_texts, normalise_chunk
from .prompt.tools import check_tools
from .runtime.base import Runtime
from .runtime.prompt_cache import PromptCache
from .selection.heads import HeadSet
from .store import TenantStore, TieredStore


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What :meth:`~cacheclip_rag.engine.CacheClipEngine.warm_up` did."""

    seconds: float
    models: tuple[str, ...]
    """Names of the loaded models, the primary's first."""
    chunks_read: int
    """Chunk caches that were read, over all models: into the memory tier, or for the system's page cache."""
    bytes_read: int
    """Their bytes in the store."""


class CacheClipEngine(Closing):
    """Answers prompts whose chunks have precomputed KV. Cheap to make: weights load at first use.

    Safe to share between threads. Engines with the same models share their weights. A ``with`` block closes it at its
    end (:meth:`close`).

    >>> engine = CacheClipEngine(store="my-store")
    >>> engine.precompute(["The Eiffel Tower is 330 metres tall."])
    >>> answer = engine.generate("The Eiffel Tower is 330 metres tall.\\n\\nHow tall is it?")
    >>> answer.text, answer.stats.ttft_s
    """

    def __init__(
        self, config: EngineConfig | None = None, *, load_primary: Callable[..., Runtime] | None = None, **options: Any
    ) -> None:
        """Settings are an :class:`EngineConfig`, keyword options with the same field names, or both (options win).
        The names of frameworks (``model``, ``model_name``) are accepted too.

        ``store`` may also be a :class:`~cacheclip_rag.store.TieredStore`, for backends of your own. Such an engine is
        not the one that another process or :func:`get_engine` finds.

        Args:
            load_primary: called with the primary's name and ``dtype=…``, instead of loading its weights into this
                process.
        """
        store = options.pop("store") if isinstance(options.get("store"), TieredStore) else None
        self.config = EngineConfig.from_options(config, options)
        self.parts = Parts(self.config, store, load_primary)
        """Store, models and caches, each made at first use."""
        self.metrics = Metrics(self.parts.tier_stats)
        """Counters over all answers; :meth:`~cacheclip_rag.guards.metrics.Metrics.to_prometheus` exports them."""
        self.observers: list[Observer] = [
            self.parts.certificates,
            MissWarning(),
            self.metrics,
            *([Tracing(self.config.primary)] if is_traced() else []),
        ]
        """Observers of every plan and every answer. Append your own."""
        rate = self.config.shadow_rate
        shadow = ShadowChecker(
            lambda: self.primary, self.metrics, self.parts.certificates, rate=rate, others=self.observers
        )
        self.observers += [shadow, *brought_observers(self.config)]
        self._writer = ChunkWriter(self.parts)
        self._answering = Answering(self.parts, self._writer, self.observers)

    def __deepcopy__(self, memo: object) -> CacheClipEngine:
        return self  # frameworks copy objects that hold an engine; copies share store and weights

    def __reduce__(self) -> tuple[Any, ...]:
        return get_engine, (self.config,)  # in another process: that process's engine with these settings

    # -- what it is made of ---------------------------------------------------------------------------------------

    @property
    def primary(self) -> Runtime:
        """The model that answers; loads it."""
        return self.parts.models.runtime

    @property
    def auxiliary(self) -> Runtime | None:
        """The model that scores tokens, if there is one; loads it."""
        caches = self.parts.models.auxiliary_caches
        return caches.runtime if caches is not None else None

    @property
    def store(self) -> TenantStore:
        """This namespace's part of the chunk-cache store."""
        return self.parts.store

    @property
    def texts(self) -> ChunkTexts:
        """Precomputed texts of this namespace and their sources."""
        return self.parts.texts

    @property
    def library(self) -> ChunkTexts:
        """An earlier name of :attr:`texts`."""
        return self.texts

    @property
    def prefixes(self) -> PromptCache:
        """The prefix cache: exact KV of the first tokens of earlier prompts, in memory. Approximate methods use it too.
        Clear it between methods if you compare them on one prompt."""
        return self.parts.prompt_cache

    @property
    def head_set(self) -> HeadSet | None:
        """The auxiliary's head set according to the settings; read once."""
        return self.parts.head_sets.default

    # -- chunks -----------------------------------------------------------------------------------------------------

    def precompute(
        self,
        texts: Documents,
        *,
        method: str | Method | None = None,
        source: str | None = None,
        document: str | None = None,
        stored: Callable[[int, int], object] | None = None,
        skipped: Callable[[str, Sequence[str], CacheClipError], object] | None = None,
    ) -> int:
        """Compute and store the KV of chunk texts for the primary model, and for the auxiliary model if there is one.

        Idempotent: a stored chunk costs a look-up only. Short texts are computed together, and one batch of them is
        written while the next one is computed, so give many at once. A killed run loses at most these two batches.

        Args:
            texts: texts, or a mapping of texts to their ``(source, document)`` pairs.
            method: method whose chunk context is used (:meth:`context_of`); default the engine's method.
            source: source of the texts (the id of a node or record), for :meth:`release`.
            document: document to which the source belongs.
            stored: called when a batch is stored, in order, with the number of its texts and how many of them had to be
                computed. Another thread may call it.
            skipped: called with each text that cannot be stored, its sources, and why; the other texts are stored.
                Default: the error is raised, and later texts are not stored.

        Returns:
            Number of texts for which something had to be computed.

        Raises:
            ConfigurationError: an empty text.
            PromptTooLongError: a text longer than the model's context.
        """
        return self._writer.precompute(texts, self.context_of(method), source, document or "", stored, skipped)

    def release(self, texts: Iterable[str] = (), *, sources: Iterable[str] = (), keep: Iterable[str] = ()) -> int:
        """Delete the KV of chunk texts, and of texts that come only from these sources or documents.

        Loads no model. Unknown names are ignored. The prefix cache is cleared, because its blocks may contain such a
        text.

        Args:
            keep: texts whose KV stays although their sources are removed, for texts that will be added again.

        Returns:
            Number of texts that had any KV.
        """
        return self._writer.release(texts) + self._writer.release_sources(sources, keep)

    def warm_up(self, *, read_chunks: bool = True) -> WarmUp:
        """Do now what the first answer would wait for. Call it when a server starts.

        It loads the weights of primary and auxiliary and the head set, opens the store and its text index, reads the
        most recently used chunk caches, reads (or computes) the KV before every chunk, and answers a short prompt with
        one token. That answer is not counted, observed or stored. Calling it again is cheap.

        Chunk caches are read into the memory tier, as many as fit into ``memory_bytes``. Without a memory tier they are
        read and dropped, up to 1 GiB and half of the free memory: the operating system's page cache then has them.

        Args:
            read_chunks: False reads no chunk caches. Without a ``store`` folder, there are none to read.

        Raises:
            The errors of a first answer: of a name that no model has, of a primary that cannot be loaded, of a store
            that cannot be opened. An auxiliary that cannot be loaded is only logged, if the method works without it.
        """
        started = time.perf_counter()
        method = self.make_method()
        context = self.context_of()
        loaded = list(self.parts.models.usable(context))
        if len(loaded) > 1:
            _ = self.head_set
        self.texts.index.find("Is the text index open?")
        read, num_bytes = self.parts.read_hot() if read_chunks else (0, 0)
        for caches in (self.parts.models.caches_after_prefix, *loaded):
            _ = caches.prefix.kv
        ready = self._answering.prefill_only(Request("Ready?", method, CallOptions(SamplingParams(max_tokens=1))))
        self.primary.decode_step(ready.cache, int(ready.logits.argmax()))
        return WarmUp(time.perf_counter() - started, tuple(each.runtime.name for each in loaded), read, num_bytes)

    def profile_machine(self, method: str | Method | None = None) -> Any:
        """Measure how long prefills take with these models on this machine, and how long this engine's store takes to
        be read, for ``recompute_ratio="auto"``.

        The profile is saved in the cache folder, and this engine uses it at once. It holds for the weights, the
        method, the settings, the processor and the number of threads of now. Takes one to two minutes with the default
        models on two CPU cores; other load makes it wrong.

        Args:
            method: default the engine's method.

        Returns:
            The profile, a ``cacheclip_lab.timing.controller.Profile``.

        Raises:
            MissingExtraError: the laboratory, which measures, is not installed.
            ConfigurationError: the method reuses no stored chunks, or the model's context is too short to measure; or
                the profile cannot be saved, and this engine alone uses it.
        """
        chosen = self.make_method(method, AUTO_RATIO)
        return self.parts.controllers.profile_machine(self, chosen)

    def is_stored(self, text: str) -> bool:
        """Whether the KV of this chunk text is stored for every model."""
        return all(normalise_chunk(text) in caches for caches in self.chunk_caches())

    def chunk_caches(self, context: ChunkContext | None = None, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Chunk caches of each model, the primary's first. Loads the models.

        Args:
            context: chunk context of the primary's caches; default that of the engine's method.
        """
        return self.parts.models.chunk_caches(context or self.context_of(), with_auxiliary=with_auxiliary)

    def close(self) -> None:
        """Close file handles; the engine may be used again afterwards. Weights stay loaded: :meth:`unload`. Everything
        is closed, also if something raises an error."""
        with ExitStack() as closing:
            closing.callback(self.parts.close)
            closing.callback(self._answering.completion.close)
            for observer in reversed(self.observers):
                closing.callback(observer.close)

    def unload(self) -> None:
        """:meth:`close`, and free the memory of the weights and of the prefix cache. The next answer loads them again.
        Other engines that have loaded the same weights keep them until they are unloaded too."""
        try:
            self.close()
        finally:
            self.parts.unload()

    def when_idle(self, step: Callable[[], bool], quiet_s: float = 0.0) -> None:
        """Have ``step`` called on a thread while no answer is under way, nor has ended for ``quiet_s`` seconds, again
        and again until it returns True. A question that comes waits for the end of one call. Loads the primary;
        :meth:`close` ends it."""
        self._answering.completion.add_step(self.primary, step, quiet_s)

    def wait_for_observers(self, timeout_s: float = 60.0) -> bool:
        """Wait for background work: that of the observers, and of ``finish="idle"``; False after ``timeout_s``
        seconds."""
        waits = [*(observer.wait for observer in self.observers), self._answering.completion.wait]
        return all([wait(timeout_s) for wait in waits])

    # -- answers ----------------------------------------------------------------------------------------------------

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | str | None = None) -> Method:
        """The method of a call with these options; see :meth:`~cacheclip_rag.answering.parts.Parts.choose_method`."""
        return self.parts.choose_method(method, recompute_ratio)

    def context_of(self, method: str | Method | None = None) -> ChunkContext:
        """The chunk context of a method (default the engine's method): its own, else the engine's setting."""
        return self.parts.context_of(method)

    def segment(
        self,
        prompt: Prompt,
        documents: Documents = (),
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        as_it_stands: bool = False,
    ) -> list[Segment]:
        """Cut a prompt into stored chunks and fresh text, see :class:`~cacheclip_rag.prompt.segments.PromptReader`.

        Args:
            as_it_stands: the prompt is a text, and gets no chat template and no system prompt.
        """
        return self.parts.segment(
            str(prompt) if as_it_stands else prompt,
            given_texts(documents),
            date=date,
            tools=check_tools(tools),
            variables=check_template_kwargs(chat_template_kwargs or {}),
            as_it_stands=as_it_stands,
        )

    def plan(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        options: CallOptions | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Plan:
        """What :meth:`generate` would do with this prompt: hits, exact chunks, budget, fallback. Computes no tensor.
        Arguments are as in :meth:`stream`."""
        return self._answering.plan(self._request(prompt, params, options, keywords))

    def generate(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        options: CallOptions | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Answer:
        """Answer a prompt. Arguments are as in :meth:`stream`.

        >>> engine.generate(prompt, max_tokens=40, stop="\\n").text
        """
        *_, last = self.stream(prompt, params, options=options, **keywords)
        assert last.answer is not None, "a stream ends with its answer"
        return last.answer

    def stream(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        options: CallOptions | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Iterator[Event]:
        """Answer a prompt as a stream of events; the last event carries the whole answer and its statistics.

        Missing chunks are computed as fresh text for this answer. Those of which half or more stands in the prompt are
        stored after its last event.

        Args:
            prompt: a string, chat messages, or segments from :meth:`segment`.
            params: sampling settings; default those of ``options``.
            options: options of the call; default none.
            keywords: fields of :class:`~cacheclip_rag.answering.options.CallOptions` (``method``, ``question``,
                ``documents``, ``finish``, ...) and of :class:`~cacheclip_rag.base.sampling.SamplingParams`
                (``max_tokens``, ...) by name; they override ``options`` and ``params``.

        Raises:
            ConfigurationError: a setting is out of range, the method needs an auxiliary model and none is set, the chat
                template does not use tools, or ``json_schema`` or tools cannot be combined with method or finish.
            MissingExtraError: ``json_schema`` is set, and the extra ``structured`` is not installed.
            PromptTooLongError: the prompt does not fit the model's context.
            UnsupportedModelError: the model's KV cannot be reused; raised when the model is loaded.
            CertificateError: ``require_certificate`` is set, and no certificate covers models, method and ratio.
        """
        yield from self._answering.stream(self._request(prompt, params, options, keywords))

    def prefill(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        options: CallOptions | None = None,
        **keywords: Unpack[CallKeywords],
    ) -> Prefilled:
        """Prefill up to the first token's logits, for evaluation. Arguments are as in :meth:`stream`, but a method
        instance is used as it is: at its own ratio, with or without an auxiliary model.

        Calls no observer, counts nothing and stores nothing. The prefix cache is read but not written."""
        called = (options or CallOptions()).with_options({"params": params, **keywords})
        method = called.method
        if not isinstance(method, Method):
            method = self.make_method(method, called.recompute_ratio)
        return self._answering.prefill_only(Request(prompt, method, called))

    def _request(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None,
        options: CallOptions | None,
        keywords: CallKeywords,
    ) -> Request:
        """The request of a call, with the engine's settings for what the call leaves out."""
        called = (options or CallOptions()).with_options({"params": params, **keywords})
        whole = called.with_settings(self.config)
        method = self.parts.choose_method(called.method, called.recompute_ratio, any_ratio=whole.auto_ratio)
        return Request(prompt, method, whole)


_engines: dict[EngineConfig, CacheClipEngine] = {}
_engines_lock = threading.Lock()


def get_engine(config: EngineConfig | None = None, **options: Any) -> CacheClipEngine:
    """The process-wide engine for these settings. Equal settings give the same engine.

    The engine lives as long as the process, and has its own prefix cache of up to ``prefix_cache_bytes``. All engines
    share weights.
    """
    config = EngineConfig.from_options(config, options)
    with _engines_lock:
        if config not in _engines:
            _engines[config] = CacheClipEngine(config)
        return _engines[config]
