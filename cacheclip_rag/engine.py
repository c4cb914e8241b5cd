"""The engine: what users call. Each call is a line or two; the work is done in the rooms beside.

A question goes through :mod:`cacheclip_rag.answering`, a chunk through :mod:`cacheclip_rag.chunks.writer`; what an
engine is made of is in :mod:`cacheclip_rag.parts`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .answering import Answering
from .chunks.caches import ChunkCaches
from .chunks.captured import CapturedChunks
from .chunks.context import ChunkContext
from .chunks.library import ChunkLibrary
from .chunks.prefix_cache import PrefixCache
from .chunks.writer import ChunkWriter
from .clock import PhaseClock
from .config import EngineConfig
from .errors import ConfigurationError
from .guards.base import Observer
from .guards.metrics import Metrics
from .guards.standard import standard_observers
from .methods.base import Method
from .parts import Parts
from .plan.planner import choose_method, context_of
from .prompt.segments import Segment, normalise_chunk
from .runtime.base import Runtime
from .runtime.prefill import Prefilled
from .sampling import SamplingParams
from .selection.heads import HeadSet
from .store import ChunkStore
from .types import Answer, Documents, Event, Plan, Prompt, Request

__all__ = ["CacheClipEngine", "get_engine"]


class CacheClipEngine:
    """Answers prompts whose chunks have precomputed KV. Cheap to make: weights load at first use.

    Safe to share between threads. Engines with the same models share their weights.

    >>> engine = CacheClipEngine(store="my-store")
    >>> engine.precompute(["The Eiffel Tower is 330 metres tall."])
    >>> answer = engine.generate("The Eiffel Tower is 330 metres tall.\\n\\nHow tall is it?")
    >>> answer.text, answer.stats.ttft_s
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Settings as an :class:`EngineConfig`, as keyword options with its field names, or both (options win).

        ``store`` may also be a :class:`~cacheclip_rag.store.ChunkStore`, for backends of your own. Such an engine is
        not the one that another process or :func:`get_engine` finds.
        """
        store = options.pop("store") if isinstance(options.get("store"), ChunkStore) else None
        self.config = EngineConfig.from_options(config, options)
        self.parts = Parts(self.config, store)
        """Store, models and caches, each made at first use."""
        self.metrics = Metrics()
        """Counts over all answers: :meth:`~cacheclip_rag.guards.metrics.Metrics.to_prometheus` for a dashboard."""
        self.observers: list[Observer] = standard_observers(self.config, self.metrics, lambda: self.primary)
        """They see every plan and every answer; append your own."""
        self._writer = ChunkWriter(self.parts)
        self._answering = Answering(self.parts, self._writer, self.observers)

    def __deepcopy__(self, memo: object) -> CacheClipEngine:
        return self  # frameworks copy what holds an engine; the store and the weights stay one

    def __reduce__(self) -> tuple[Any, ...]:
        return get_engine, (self.config,)  # in another process: the engine of these settings there

    # -- what it is made of ---------------------------------------------------------------------------------------

    @property
    def primary(self) -> Runtime:
        """The model that answers; loads it."""
        return self.parts.prefix_caches.runtime

    @property
    def auxiliary(self) -> Runtime | None:
        """The model that scores tokens, if there is one; loads it."""
        return self.parts.runtime("auxiliary")

    @property
    def store(self) -> ChunkStore:
        """The chunk-cache store."""
        return self.parts.store

    @property
    def library(self) -> ChunkLibrary:
        """Which texts were precomputed in this namespace, and where they come from if that was said."""
        return self.parts.library

    @property
    def prefixes(self) -> PrefixCache:
        """Exact KV of the starts of earlier prompts, in memory. As far as it reaches, approximate methods are exact:
        whoever compares methods on one prompt clears it in between."""
        return self.parts.prefixes

    @property
    def captured(self) -> CapturedChunks:
        """Chunk caches captured from answered prompts, in memory, for methods that use them."""
        return self.parts.captured

    @property
    def head_set(self) -> HeadSet | None:
        """Which heads of the auxiliary score, as the settings ask for it; read once."""
        return self.parts.head_set

    # -- chunks -----------------------------------------------------------------------------------------------------

    def precompute(
        self,
        texts: Iterable[str],
        *,
        method: str | Method | None = None,
        source: str | None = None,
        document: str | None = None,
    ) -> int:
        """Compute and store the KV of chunk texts, for the primary and (if there is one) the auxiliary model.

        Idempotent: what is stored already costs a look-up. A killed run loses at most the chunk it was at.

        Args:
            method: compute chunks behind what this method needs (:meth:`context_of`); default the engine's.
            source: what the texts come from (the id of a node or record), for :meth:`release`.
            document: what the source is a part of.

        Returns:
            Number of texts for which something had to be computed.

        Raises:
            ConfigurationError: an empty text.
            PromptTooLongError: a text longer than the model's context.
        """
        return self._writer.precompute(texts, self.context_of(method), source, document or "")

    def release(self, texts: Iterable[str] = (), *, sources: Iterable[str] = (), keep: Iterable[str] = ()) -> int:
        """Delete the KV of chunk texts, and of what came from these sources or documents and from no other.

        Loads no model. Unknown names are passed over. The prefix cache is emptied, since any of its blocks may hold
        such a text.

        Args:
            keep: texts whose KV stays, though their sources are forgotten: those that will come from them again.

        Returns:
            Number of texts that had any KV.
        """
        return self._writer.release(texts) + self._writer.release_sources(sources, keep)

    def is_stored(self, text: str, *, needs_auxiliary: bool = True) -> bool:
        """Whether the KV of this chunk text is there for every model a method needs."""
        chunk = normalise_chunk(text)
        return all(chunk in caches for caches in self.chunk_caches(with_auxiliary=needs_auxiliary))

    def chunk_caches(self, context: ChunkContext | None = None, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Where the KV of a chunk is kept, model by model, the primary's first; loads the models.

        Args:
            context: what chunks are computed behind for the primary; default as the engine's method wants it.
        """
        return self.parts.chunk_caches(context or self.context_of(), with_auxiliary=with_auxiliary)

    def close(self) -> None:
        """Release file handles; the engine may be used again afterwards. Weights stay with the process."""
        for observer in self.observers:
            observer.close()
        self.parts.close()

    def wait_for_observers(self, timeout_s: float = 60.0) -> bool:
        """Wait until observers have done their work in the background; False if it took longer."""
        return all([observer.wait(timeout_s) for observer in self.observers])

    # -- answers ----------------------------------------------------------------------------------------------------

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | None = None) -> Method:
        """What a call with these options computes by, see :func:`~cacheclip_rag.plan.planner.choose_method`."""
        return choose_method(self.config, method, recompute_ratio, lambda: self.parts.has_head_set)

    def context_of(self, method: str | Method | None = None) -> ChunkContext:
        """What chunks are computed behind for a method (default the engine's): what the method says itself, else what
        the settings say. Loads no model."""
        return context_of(self.config, method) or self.parts.default_context

    def segment(self, prompt: Prompt, documents: Documents = (), *, date: str | None = None) -> list[Segment]:
        """Cut a prompt into stored chunks and fresh text, see :class:`~cacheclip_rag.prompt.segments.PromptReader`."""
        return self.parts.reader().segments(prompt, self.library.index, documents, date=date)

    def plan(
        self,
        prompt: Prompt | Sequence[Segment],
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        documents: Documents = (),
    ) -> Plan:
        """What :meth:`generate` would do with this prompt: hits, exact chunks, budget, fallback. Computes nothing."""
        chosen = self.make_method(method, recompute_ratio)
        request = Request(prompt, SamplingParams(), chosen, question, documents)
        return self._answering.plan(request, self.parts.sources(chosen), PhaseClock())

    def generate(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        documents: Documents = (),
        trace: bool = False,
    ) -> Answer:
        """The whole answer to a prompt. Arguments as in :meth:`stream`."""
        answer = None
        for event in self.stream(
            prompt,
            params,
            method=method,
            recompute_ratio=recompute_ratio,
            question=question,
            documents=documents,
            trace=trace,
        ):
            answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    def stream(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        documents: Documents = (),
        trace: bool = False,
    ) -> Iterator[Event]:
        """Answer piece by piece; the last event carries the whole answer and its statistics.

        Chunks found missing are computed as fresh text for this answer and stored after its last event.

        Args:
            prompt: a string, chat messages, or segments from :meth:`segment`.
            params: sampling settings; default greedy, 256 tokens.
            method: name or instance; default the engine's.
            recompute_ratio: default the engine's.
            question: text that scores the chunks; default the text after the last chunk.
            documents: chunk texts known to be in the prompt, so that they are chunks even if nothing is stored of them
                (not looked for when segments are given); a mapping also says where each comes from.
            trace: also record scores, recomputed tokens and seconds per layer, as the answer's ``trace``.

        Raises:
            ConfigurationError: settings out of range, or a method whose auxiliary model is not configured.
            PromptTooLongError: the prompt does not fit the model's context.
            UnsupportedModelError: a model whose KV cannot be reused exactly, without ``fallback="full"``.
            CertificateError: ``require_certificate`` is set, and no certificate covers models, method and ratio.
        """
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ConfigurationError(f"params must be SamplingParams, got {type(params).__name__}.")
        if question is not None and not isinstance(question, str):
            raise ConfigurationError(f"the question must be a string, got {type(question).__name__}.")
        chosen = self.make_method(method, recompute_ratio)
        yield from self._answering.stream(Request(prompt, params, chosen, question, documents, trace))

    def prefill(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: Method,
        question: str | None = None,
        documents: Documents = (),
    ) -> Prefilled:
        """Everything up to the first token's logits, for those who evaluate: no observer is asked, nothing is counted
        or stored, not in the prefix cache either (it is read). Arguments as in :meth:`stream`."""
        if method.composes:
            raise ConfigurationError(
                f"method {method.name!r} answers by several prompts, so that there is no single prefill to look at or "
                "to certify. Use generate() or stream()."
            )
        return self._answering.prefill(Request(prompt, params or SamplingParams(), method, question, documents))


_engines: dict[EngineConfig, CacheClipEngine] = {}
_engines_lock = threading.Lock()


def get_engine(config: EngineConfig | None = None, **options: Any) -> CacheClipEngine:
    """The process-wide engine for these settings. Equal settings give the same one: front ends need hold no engine.

    It stays for as long as the process does, with a prefix cache of up to ``prefix_cache_bytes`` of its own; the
    weights are shared by all.
    """
    config = EngineConfig.from_options(config, options)
    with _engines_lock:
        if config not in _engines:
            _engines[config] = CacheClipEngine(config)
        return _engines[config]
