"""The engine: from a prompt to an answer, with the KV of its chunks taken from the store.

:meth:`CacheClipEngine.stream` is the data flow of the whole library, top to bottom::

    prompt -> segments -> plan (no tensors) -> prefill (fused, or plain where nothing is stored) -> first token -> decode
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .chunks.caches import ChunkCaches
from .chunks.captured import CapturedChunks
from .chunks.context import ChunkContext
from .chunks.library import ChunkLibrary
from .chunks.prefix_cache import PrefixCache
from .clock import PhaseClock
from .config import EngineConfig
from .errors import CacheClipError, ConfigurationError
from .guards.base import Answered, Observer
from .guards.certificate import Identity, identity_of
from .guards.metrics import Metrics
from .guards.standard import standard_observers
from .methods.base import Method
from .methods.choice import choose_method, context_of
from .methods.composition import Composition, LogitsObserver, count_chunks
from .parts import PREFIX, Parts
from .plan.planner import make_plan
from .prompt.segments import Segment, as_segments, chunk_texts, normalise_chunk
from .runtime.base import Runtime
from .runtime.decoding import decode, room_for
from .runtime.prefill import Prefilled, prefill
from .sampling import SamplingParams
from .selection.heads import HeadSet
from .store import ChunkStore
from .types import Answer, Documents, Event, Plan, Prompt, Request

__all__ = ["CacheClipEngine", "get_engine"]

logger = logging.getLogger(__name__)


class CacheClipEngine:
    """Answers prompts whose chunks have precomputed KV. Cheap to make: weights load at first use.

    Safe to share between threads. Engines with the same models share their weights.

    >>> engine = CacheClipEngine(store="my-store")
    >>> engine.precompute(["The Eiffel Tower is 330 metres tall."])
    >>> answer = engine.generate("The Eiffel Tower is 330 metres tall.\\n\\nHow tall is it?")
    >>> answer.text, answer.stats.ttft_s
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        """Settings as an :class:`EngineConfig`, as keyword options with its field names, or both (options win)."""
        self.config = EngineConfig.from_options(config, options)
        self.parts = Parts(self.config)
        """Store, models and caches, each made at first use."""
        self.metrics = Metrics()
        """Counts over all answers: :meth:`~cacheclip_rag.guards.metrics.Metrics.to_prometheus` for a dashboard."""
        self.observers: list[Observer] = standard_observers(self.config, self.metrics, lambda: self.primary)
        """They see every plan and every answer; append your own."""

    def __deepcopy__(self, memo: object) -> CacheClipEngine:
        return self  # frameworks copy what holds an engine; the store and the weights stay one

    def __reduce__(self) -> tuple[Any, ...]:
        return get_engine, (self.config,)  # in another process: the engine of these settings there

    # -- what it is made of ---------------------------------------------------------------------------------------

    @property
    def primary(self) -> Runtime:
        """The model that answers; loads it."""
        return self.parts.primary().runtime

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
            source: what the texts come from (the id of a node or record), for :meth:`release_sources`.
            document: what the source is a part of.

        Returns:
            Number of texts for which something had to be computed.

        Raises:
            ConfigurationError: an empty text.
            PromptTooLongError: a text longer than the model's context.
        """
        computed = 0
        context = self.context_of(method)
        for chunk in chunk_texts(texts):
            if not chunk:
                raise ConfigurationError("a chunk must hold text, got an empty or blank string.")
            models = self.chunk_caches(context)
            for caches in models:
                caches.check_length(chunk)  # before anything is written for any of them
            # every role must run: no short-circuit
            computed += any([caches.write(chunk) for caches in models])
            self.library.add(chunk, source, document or "")
        return computed

    def release_sources(self, gone: Iterable[str], *, keep: Iterable[str] = ()) -> int:
        """Delete the KV of what came from these sources or documents and from no other; returns how many texts had any.

        Unknown names are passed over: nothing was stored from them.

        Args:
            keep: texts whose KV stays, though their sources are forgotten: those that will come from them again.
        """
        if isinstance(gone, str):
            raise ConfigurationError("expected a list of sources, got one string: put it in a list.")
        names = set(gone)
        released = self.release(self.library.orphans(names, set(chunk_texts(keep))))
        self.library.remove_sources(names)  # last: a killed run does it again
        return released

    def release(self, texts: Iterable[str]) -> int:
        """Delete the KV of chunk texts, of every model and chunk context; returns how many texts had any.

        Loads no model. The prefix cache is emptied, since any of its blocks may hold such a text.
        """
        chunks = list(chunk_texts(texts))
        if not chunks:
            return 0  # the prefix cache keeps its blocks
        self.prefixes.clear()
        # both must run: no short-circuit
        return sum([any([self.library.release([chunk]), self.captured.remove(chunk)]) for chunk in chunks])

    def is_stored(self, text: str, *, needs_auxiliary: bool = True) -> bool:
        """Whether the KV of this chunk text is there for every model a method needs."""
        chunk = normalise_chunk(text)
        return all(chunk in caches for caches in self.chunk_caches(with_auxiliary=needs_auxiliary))

    def chunk_caches(self, context: ChunkContext | None = None, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Where the KV of a chunk is kept, model by model, the primary's first; loads the models.

        Args:
            context: what chunks are computed behind for the primary; default as the engine's method wants it.
        """
        found = [self.parts.primary(context or self.context_of())]
        if with_auxiliary and (auxiliary := self.parts.auxiliary) is not None:
            found.append(auxiliary)
        return found

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
        """What a call with these options computes by, see :func:`~cacheclip_rag.methods.choice.choose_method`."""
        return choose_method(self.config, method, recompute_ratio, lambda: self.parts.has_head_set)

    def context_of(self, method: str | Method | None = None) -> ChunkContext:
        """What chunks are computed behind for a method (default the engine's): what the method says itself, else what
        the settings say. Loads no model."""
        return context_of(self.config, method) or self.parts.default_context

    def identity(self, method: Method) -> Identity:
        """What a certificate must be about to cover this engine with this method."""
        return identity_of(self.config, method, self.parts.primary(), self.parts.scorer_of(method))

    def segment(self, prompt: Prompt, documents: Documents = (), *, date: str | None = None) -> list[Segment]:
        """Cut a prompt into stored chunks and fresh text, see :class:`~cacheclip_rag.prompt.reader.PromptReader`."""
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
        return self._plan(Request(prompt, SamplingParams(), chosen, question, documents), PhaseClock())[0]

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

    @torch.inference_mode()
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
        request = Request(prompt, params, chosen, question, documents, trace)
        if chosen.composes:
            yield from self._compose(request)
            return
        plan, prefilled = self._prefill(request, observed=True)
        for event in decode(self.primary, prefilled, params):
            if event.answer is not None:
                self._observe(Answered(plan, event.answer, params, prefilled.logits))
            yield event
        self._store_missing(prefilled.missing, documents, self.context_of(chosen))

    @torch.inference_mode()
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
        return self._prefill(Request(prompt, params or SamplingParams(), method, question, documents))[1]

    def _prefill(self, request: Request, *, observed: bool = False) -> tuple[Plan, Prefilled]:
        sources = self.parts.sources(request.method)  # weights are loaded before the clock starts
        clock = PhaseClock()
        plan, _ = self._plan(request, clock)
        if observed:
            for observer in self.observers:
                observer.on_plan(plan, sources)
        room = room_for(request.params)
        return plan, prefill(plan, sources, params_tokens=room, clock=clock, trace=request.trace)

    def _plan(self, request: Request, clock: PhaseClock) -> tuple[Plan, list[Segment]]:
        sources = self.parts.sources(request.method)
        with clock.phase("lookup"):
            segments = as_segments(request.prompt)
            if segments is None:
                segments = self.segment(request.prompt, request.documents)  # type: ignore[arg-type]
            return make_plan(segments, request.method, sources, question=request.question), segments

    def _compose(self, request: Request) -> Iterator[Event]:
        """An answer made of several, each of them exact."""
        missing: dict[str, None] = {}

        def ask(
            segments: Sequence[Segment], params: SamplingParams, observe: LogitsObserver | None = None
        ) -> Iterator[Event]:
            _, prefilled = self._prefill(Request(segments, params, None))
            missing.update(dict.fromkeys(prefilled.missing))
            counted = count_chunks(prefilled.stats, prefilled.layout)
            yield from decode(self.primary, replace(prefilled, stats=counted), params, observe)

        self.parts.primary()  # weights are loaded before the clock starts
        clock = PhaseClock()
        segments = as_segments(request.prompt)
        if segments is None:
            segments = self.segment(request.prompt, request.documents)  # type: ignore[arg-type]
        composition = Composition(segments, request.params, ask, clock)
        assert request.method is not None
        for event in request.method.compose(composition) if composition.chunks else composition.plain():
            if event.answer is not None:
                self._observe(Answered(None, event.answer, request.params))
            yield event
        self._store_missing(tuple(missing), request.documents, PREFIX)

    def _observe(self, answered: Answered) -> None:
        for observer in self.observers:
            observer.on_answer(answered)

    def _store_missing(self, chunks: Sequence[str], documents: Documents, context: ChunkContext) -> None:
        """What was missing in an answer, for the next. The answer is out: a full disk must not take it back."""
        if not chunks or self.config.on_miss != "store":
            return
        origins = _origins(documents)
        for chunk in chunks:
            try:
                for caches in self.parts.usable(context):
                    caches.write(chunk)
                self.library.add(chunk)
                for source, document in origins.get(chunk, ()):
                    self.library.add_source(chunk, source, document)
            except CacheClipError as error:
                logger.warning("a chunk of this prompt could not be stored: %s", error)


def _origins(documents: Documents) -> dict[str, list[tuple[str, str]]]:
    """Sources and documents of each chunk, as far as they were said."""
    found: dict[str, list[tuple[str, str]]] = {}
    for text, origins in documents.items() if isinstance(documents, Mapping) else ():
        found.setdefault(normalise_chunk(text), []).extend(origins)
    return found


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
