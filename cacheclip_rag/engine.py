"""The engine: from a prompt to an answer, with the KV of its chunks taken from the store.

Read top to bottom, ``generate_stream`` is the data flow of the whole library::

    prompt -> segments -> layout -> prefill (fused, or plain where nothing is stored) -> first token -> decode
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .answer import Answer, StreamEvent
from .checks import check_ratio
from .chunks.caches import ChunkCaches
from .chunks.captured import CapturedChunks
from .chunks.context import CONTEXTS, ChunkContext
from .chunks.prefix_cache import PrefixCache
from .config import EngineConfig
from .errors import CacheClipError, ConfigurationError, ModelError
from .fusion.prefill import Prefill, Prefilled
from .guards.certificate import Identity, check_certificate, identity_of
from .guards.metrics import Metrics
from .guards.shadow import ShadowChecker, ShadowRequest
from .methods import DEFAULT_METHOD, PRESET_NAMES, check_auxiliary, check_method, preset
from .methods.base import Method
from .methods.composition import Composition, count_chunks, exact_method
from .models.load import load_any
from .prompt.layout import check_length, lay_out
from .prompt.segments import (
    Fresh,
    Message,
    Prompt,
    Segment,
    as_segments,
    check_messages,
    chunk_texts,
    normalise_chunk,
    segment_chat,
    segment_text,
)
from .runtime.decoding import Observer, capacity_for, decode, is_greedy
from .runtime.transformers.model import ModelRuntime
from .runtime.transformers.text import TextModel
from .sampling import SamplingParams
from .selection.heads import HeadSet, find_head_set, load_named
from .selection.scoring import AuxiliaryScorer
from .stats import PhaseClock
from .store import ChunkStore, DiskStore, MemoryStore, SourceIndex, TextIndex, TieredStore

__all__ = ["Answer", "CacheClipEngine", "StreamEvent", "get_engine"]

logger = logging.getLogger(__name__)

_AUXILIARY_CONTEXT = CONTEXTS["prefix"]
"""The auxiliary's chunk caches always stand right behind its prefix."""

Candidates = Iterable[str] | Mapping[str, Iterable[tuple[str, str]]]
"""Chunk texts known to be in a prompt. A mapping also says where each comes from, as ``(source, document)`` pairs (see
:meth:`CacheClipEngine.precompute`; the document may be empty): what is stored after an answer goes with its sources."""

_PREFIX_DATE = "01 Jan 2025"
"""Date in the shared prefix of a chat template that states today's: else every night would make all chunks misses."""


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
        self._lock = threading.RLock()
        self._caches: dict[tuple[str, ChunkContext], ChunkCaches] = {}
        self._store: ChunkStore | None = None
        self._texts: TextIndex | None = None
        self._sources: SourceIndex | None = None
        self._prefixes: PrefixCache | None = None
        self._captured: CapturedChunks | None = None
        self._head_set: tuple[HeadSet | None] | None = None
        self._named_heads: dict[str, HeadSet] = {}
        self._shadow: ShadowChecker | None = None
        self._checked: set[tuple[str, float]] = set()
        self.metrics = Metrics()
        """Counts over all answers: :meth:`~cacheclip_rag.guards.metrics.Metrics.to_prometheus` for a dashboard."""

    def __deepcopy__(self, memo: object) -> CacheClipEngine:
        return self  # frameworks copy what holds an engine; the store and the weights stay one

    def __reduce__(self) -> tuple[Any, ...]:
        return get_engine, (self.config,)  # in another process: the engine of these settings there

    # -- parts, made at first use -------------------------------------------------------------------------------

    @property
    def store(self) -> ChunkStore:
        """The chunk-cache store: memory only, disk, or memory before disk, as configured."""
        with self._lock:
            if self._store is None:
                self._store = self._make_store()
            return self._store

    def _make_store(self) -> ChunkStore:
        config = self.config
        if config.store is None:
            return MemoryStore(config.max_bytes)
        disk = DiskStore(Path(config.store), config.max_bytes)
        return TieredStore([MemoryStore(config.memory_bytes), disk]) if config.memory_bytes else disk

    @property
    def texts(self) -> TextIndex:
        """Which texts were precomputed in this namespace."""
        with self._lock:
            if self._texts is None:
                self._texts = TextIndex(self._folder, self.config.namespace)
            return self._texts

    @property
    def sources(self) -> SourceIndex:
        """Which records and documents the precomputed texts come from, where that was said."""
        with self._lock:
            if self._sources is None:
                self._sources = SourceIndex(self._folder, self.config.namespace)
            return self._sources

    @property
    def _folder(self) -> Path | None:
        return Path(self.config.store).expanduser() if self.config.store else None

    @property
    def prefixes(self) -> PrefixCache:
        """Exact KV of the starts of earlier prompts, in memory. As far as it reaches, approximate methods are exact:
        whoever compares methods on one prompt clears it in between."""
        with self._lock:
            if self._prefixes is None:
                self._prefixes = PrefixCache(self.config.prefix_cache_bytes, extra_keys=(self.config.namespace,))
            return self._prefixes

    @property
    def primary(self) -> TextModel:
        return self._caches_of(self.config.primary).runtime

    @property
    def auxiliary(self) -> TextModel | None:
        return self._caches_of(self.config.auxiliary).runtime if self.config.auxiliary else None

    @property
    def head_set(self) -> HeadSet | None:
        """Which heads of the auxiliary score, as the settings ask for it; read once."""
        with self._lock:
            if self._head_set is None:
                setting, found = str(self.config.heads), None
                if setting != "none" and isinstance(auxiliary := self.auxiliary, ModelRuntime):
                    found = find_head_set(setting, auxiliary, self.primary.fingerprint)
                self._head_set = (found,)
            return self._head_set[0]

    def named_heads(self, names: Collection[str]) -> dict[str, HeadSet]:
        """The head sets that a method asks for by name or file; each is read once. None where the auxiliary is missing
        or cannot be reused: nothing is scored then.

        Raises:
            ModelError: there is none of that name, or it cannot be read, or was made for another model.
        """
        auxiliary = self.auxiliary
        if not isinstance(auxiliary, ModelRuntime):
            return {}
        with self._lock:
            for name in names:
                if name not in self._named_heads:
                    found = load_named(name)
                    found.check(auxiliary, name)
                    self._named_heads[name] = found
            return {name: self._named_heads[name] for name in names}

    def use_heads(self, heads: HeadSet | None) -> None:
        """Have the auxiliary score by these heads from now on, whatever the settings say; None: by its last layer.

        Raises:
            ConfigurationError: there is no auxiliary model.
            ModelError: they were made for another model.
        """
        if heads is not None:
            if self.auxiliary is None:
                raise ConfigurationError("a head set is for an auxiliary model, and there is none. Set auxiliary.")
            heads.check(self.auxiliary)
        with self._lock:
            self._head_set = (heads,)

    @property
    def auxiliary_caches(self) -> ChunkCaches:
        """Chunk caches of the auxiliary model, of an engine that has one."""
        assert self.config.auxiliary, "asked for the caches of an auxiliary model that there is not"
        return self._caches_of(self.config.auxiliary)

    @property
    def captured(self) -> CapturedChunks:
        """Chunk caches captured from answered prompts, in memory, for methods that use them."""
        with self._lock:
            if self._captured is None:
                self._captured = CapturedChunks()
            return self._captured

    def _caches_of(self, name: str, context: ChunkContext = _AUXILIARY_CONTEXT) -> ChunkCaches:
        with self._lock:
            role = "primary" if name == self.config.primary else "auxiliary"
            if (role, context) not in self._caches:
                config = self.config
                device = config.device if role == "primary" else config.auxiliary_device or config.device
                runtime = load_any(name, dtype=config.dtype, device=device, fallback=config.fallback)
                codec = config.codec or config.dtype
                self._caches[role, context] = ChunkCaches(
                    runtime,
                    self.store,
                    prefix_ids=self._prefix_ids(runtime),
                    namespace=self.config.namespace,
                    codec=codec if role == "primary" else self.config.auxiliary_codec,
                    context=context,
                )
            return self._caches[role, context]

    def _prefix_ids(self, runtime: TextModel) -> list[int]:
        """Token ids of the shared prefix: the chat template's opening, up to the first word of the user."""
        content = "\u2063"
        opening = self._opening(runtime)
        if runtime.has_chat_template:
            messages = [*self._system_messages(), {"role": "user", "content": content}]
            # no stored text is looked for: what is in the store must not change the prefix
            segments = segment_chat(messages, lambda m: runtime.render_chat(m, date=_PREFIX_DATE), TextIndex())
            opening = segments[: segments.index(Fresh(content))]
        return [token for s in opening for token in runtime.tokenize(s.text, control=s.control).ids]

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.config.system_prompt}] if self.config.system_prompt else []

    def _opening(self, runtime: TextModel) -> list[Segment]:
        """How the prompt of a model without a chat template opens: its BOS, then the system prompt."""
        opening = [Fresh(runtime.opening, control=True), Fresh(self.config.system_prompt or "")]
        return [segment for segment in opening if segment.text]

    # -- the three calls ----------------------------------------------------------------------------------------

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
            self.texts.add([chunk])
            if source is not None:
                self.sources.add(source, chunk, document or "")
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
        released = self.release(self.sources.orphans(names, set(chunk_texts(keep))))
        self.sources.remove(names)  # last: a killed run does it again
        return released

    def release(self, texts: Iterable[str]) -> int:
        """Delete the KV of chunk texts, for every model that can be loaded; returns how many texts had any.

        The prefix cache forgets everything, since any of its blocks may hold such a text. Chunks stored with
        other settings of a method (special tokens around each) are found by an engine of the same settings.
        """
        chunks = list(chunk_texts(texts))
        if not chunks:
            return 0  # no weights are loaded for nothing
        self.prefixes.clear()
        released = 0
        own = {context for name in PRESET_NAMES if (context := preset(name).context) is not None}
        list(self._usable_caches())  # now among self._caches, as all others
        for context in {*own, *CONTEXTS.values(), self.context_of()}:
            self._caches_of(self.config.primary, context)
        everywhere = list(self._caches.values())
        for chunk in chunks:
            released += any([caches.delete(chunk) for caches in everywhere] + [self.captured.remove(chunk)])
            self.texts.remove([chunk])
        return released

    def is_stored(self, text: str, *, needs_auxiliary: bool = True) -> bool:
        """Whether the KV of this chunk text is there for every model a method needs."""
        chunk = normalise_chunk(text)
        return all(chunk in caches for caches in self.chunk_caches(with_auxiliary=needs_auxiliary))

    def close(self) -> None:
        """Release file handles; the engine may be used again afterwards. Weights stay with the process."""
        with self._lock:
            shadow, self._shadow = self._shadow, None
        if shadow is not None:
            shadow.close()
        self.store.close()
        self.texts.close()
        self.sources.close()
        self.prefixes.clear()
        self.captured.clear()

    def wait_for_shadows(self, timeout_s: float = 60.0) -> bool:
        """Wait until every comparison with full prefill that is under way is done; False if it took longer."""
        return self._shadow is None or self._shadow.wait(timeout_s)

    def segment(self, prompt: Prompt, candidates: Candidates = (), *, date: str | None = None) -> list[Segment]:
        """Cut a prompt into stored chunks and fresh text.

        Args:
            prompt: a string (taken as one user message if the model has a chat template) or a list of messages. The
                engine's system prompt comes before messages that hold none.
            candidates: chunk texts known to be in the prompt, stored or not (retrieved nodes, documents).
            date: what a chat template that states the date writes, default today's.
        """
        runtime = self.primary
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        if not runtime.has_chat_template:
            text = "\n\n".join(message["content"] for message in messages)
            return self._opening(runtime) + segment_text(text, self.texts, candidates)
        if all(message["role"] != "system" for message in messages):
            messages = [*self._system_messages(), *messages]
        # the system prompt is prefix, whatever of it the store may hold
        own = self.config.system_prompt
        return segment_chat(
            messages,
            lambda m: runtime.render_chat(m, date=date),
            self.texts,
            candidates,
            verbatim=(own,) if own else (),
        )

    def generate(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        candidates: Candidates = (),
    ) -> Answer:
        """The whole answer to a prompt. Arguments as in :meth:`generate_stream`."""
        answer = None
        for event in self.generate_stream(
            prompt, params, method=method, recompute_ratio=recompute_ratio, question=question, candidates=candidates
        ):
            answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    @torch.inference_mode()
    def generate_stream(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        candidates: Candidates = (),
    ) -> Iterator[StreamEvent]:
        """Answer piece by piece; the last event carries the whole answer and its statistics.

        Chunks found missing are computed as fresh text for this answer and stored after its last event.

        Args:
            prompt: a string, chat messages, or segments from :meth:`segment`.
            params: sampling settings; default greedy, 256 tokens.
            method: name or instance; default the engine's.
            recompute_ratio: default the engine's.
            question: text that scores the chunks; default the text after the last chunk.
            candidates: chunk texts known to be in the prompt, so that they are chunks even if nothing is stored of them
                (not looked for when segments are given); a mapping also says where each comes from.

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
        if chosen.composes:
            yield from self._compose(chosen, prompt, params, candidates)
            return
        prefilled = self._prefill(prompt, params, chosen, question, candidates, lambda: self._check_certificate(chosen))
        for event in decode(self.primary, prefilled, params):
            if event.answer is not None:
                self._record(prefilled, event.answer, params)
            yield event
        self._store_missing(prefilled.missing, candidates, self.context_of(chosen))

    def _compose(
        self, method: Method, prompt: Prompt | Sequence[Segment], params: SamplingParams, candidates: Candidates
    ) -> Iterator[StreamEvent]:
        """An answer made of several, each of them exact: no certificate is needed."""
        missing: dict[str, None] = {}

        def ask(
            segments: Sequence[Segment], params: SamplingParams, observe: Observer | None = None
        ) -> Iterator[StreamEvent]:
            prefilled = self._prefill(segments, params, None, None, (), lambda: None)
            missing.update(dict.fromkeys(prefilled.missing))
            counted = count_chunks(prefilled.stats, prefilled.layout)
            yield from decode(self.primary, replace(prefilled, stats=counted), params, observe)

        self._caches_of(self.config.primary)  # weights are loaded before the clock starts
        clock = PhaseClock()
        segments = as_segments(prompt)
        if segments is None:
            segments = self.segment(prompt, candidates)  # type: ignore[arg-type]
        parts = Composition(segments, params, ask, clock)
        for event in method.compose(parts) if parts.chunks else parts.plain():
            if event.answer is not None:
                self.metrics.record_answer(event.answer.stats)
            yield event
        self._store_missing(tuple(missing), candidates)

    def _store_missing(
        self, chunks: Sequence[str], candidates: Candidates, context: ChunkContext = _AUXILIARY_CONTEXT
    ) -> None:
        """What was missing in an answer, for the next. The answer is out: a full disk must not take it back."""
        if not chunks or self.config.on_miss != "store":
            return
        origins = _origins(candidates)
        for chunk in chunks:
            try:
                for caches in self._usable_caches(context):
                    caches.write(chunk)
                self.texts.add([chunk])
                for source, document in origins.get(chunk, ()):
                    self.sources.add(source, chunk, document)
            except CacheClipError as error:
                logger.warning("a chunk of this prompt could not be stored: %s", error)

    def _usable_caches(self, context: ChunkContext = _AUXILIARY_CONTEXT) -> Iterator[ChunkCaches]:
        """The primary's caches, then the auxiliary's unless that model cannot be had: other methods work without."""
        yield self._caches_of(self.config.primary, context)
        if self.config.auxiliary:
            try:
                yield self._caches_of(self.config.auxiliary)
            except ModelError as error:
                logger.warning("going on without the auxiliary model: %s", error)

    @torch.inference_mode()
    def prefill(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams | None = None,
        *,
        method: Method,
        question: str | None = None,
        candidates: Candidates = (),
    ) -> Prefilled:
        """Everything up to the first token's logits, for those who evaluate: no certificate is asked for, nothing is
        counted or stored, not in the prefix cache either (it is read). Arguments as in :meth:`generate_stream`."""
        if method.composes:
            raise ConfigurationError(
                f"method {method.name!r} answers by several prompts, so that there is no single prefill to look at or "
                "to certify. Use generate() or generate_stream()."
            )
        return self._prefill(prompt, params or SamplingParams(), method, question, candidates, lambda: None)

    def _prefill(
        self,
        prompt: Prompt | Sequence[Segment],
        params: SamplingParams,
        method: Method | None,
        question: str | None,
        candidates: Candidates,
        before_reuse: Callable[[], None],
    ) -> Prefilled:
        """``method``: None for whichever of the exact ones costs least."""
        primary = self._caches_of(self.config.primary)  # weights are loaded before the clock starts
        auxiliary = self._scorer_of(method) if method else None
        context = self.context_of(method) if method else self._default_context
        encoded = self._caches_of(self.config.primary, context)
        captures = method is not None and method.captures
        clock = PhaseClock()
        with clock.phase("lookup"):
            segments = as_segments(prompt)
            if segments is None:
                segments = self.segment(prompt, candidates)  # type: ignore[arg-type]
            if method is not None:
                segments = method.arrange(segments, primary.runtime)
            layout = lay_out(segments, encoded.tokenize_segment, primary.prefix_ids)
            layout = replace(layout, exact_behind_prefix=context.is_exact_behind_prefix and not captures)
            check_length(layout, primary.runtime.context_tokens, primary.runtime.name)
        capacity = capacity_for(layout.num_tokens, params)
        chunks = self.captured if captures else encoded
        parts = (layout, method or exact_method(layout), primary, auxiliary, chunks, self.prefixes)
        return Prefill(*parts, capacity, clock, question, before_reuse).run()

    # -- answering ----------------------------------------------------------------------------------------------

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | None = None) -> Method:
        """What a call with these options computes by: the method of that name, or that instance, at this ratio.

        Args:
            method: default the engine's. ``auto`` is ``cacheclip`` where the auxiliary model can be had and has a head
                set, and else ``anchored``; to know it loads the models.
            recompute_ratio: default the engine's for the engine's method and for names, else the instance's own. A
                preset without a ratio ignores it.

        Raises:
            ConfigurationError: an unknown name, a ratio out of range or given beside an instance that has none, or no
                auxiliary model where the method needs one.
        """
        given = self.config.method if method is None else method
        check_method(given)
        ratio = recompute_ratio
        if ratio is None and (method is None or isinstance(method, str)):
            ratio = self.config.recompute_ratio
        chosen = self._named(given) if isinstance(given, str) else given
        if ratio is not None:
            check_ratio(ratio)
            if chosen.has_ratio or (recompute_ratio is not None and not isinstance(given, str)):
                chosen = chosen.at(ratio)
        check_auxiliary(chosen, self.config.auxiliary)
        return chosen

    def _named(self, name: str) -> Method:
        if name == DEFAULT_METHOD:
            name = "cacheclip" if self._has_head_set else "anchored"
        return preset(name)

    @property
    def _has_head_set(self) -> bool:
        """False too where the auxiliary cannot be had, or the primary has no KV to be chosen from: a head set that
        cannot be read is an error, and a missing model is told where its chunk caches should be written."""
        if not self.config.auxiliary or self.config.heads == "none" or not isinstance(self.primary, ModelRuntime):
            return False
        try:
            _ = self.auxiliary
        except ModelError:
            return False
        return self.head_set is not None

    def _record(self, prefilled: Prefilled, answer: Answer, params: SamplingParams) -> None:
        """Count an answer, and have a share of those that reused something compared with full prefill."""
        self.metrics.record_answer(answer.stats)
        runtime = self.primary
        if not self.config.shadow_rate or answer.stats.method == "full" or not isinstance(runtime, ModelRuntime):
            return
        with self._lock:
            if self._shadow is None:
                config = self.config
                self._shadow = ShadowChecker(runtime, self.metrics, rate=config.shadow_rate, mode=config.shadow_mode)
        self._shadow.offer(
            ShadowRequest(
                prefilled.layout.ids, prefilled.logits.clone(), answer.token_ids, is_greedy(params), answer.stats
            )
        )

    def identity(self, method: Method) -> Identity:
        """What a certificate must be about to cover this engine with this method."""
        return identity_of(self.config, method, self._caches_of(self.config.primary), self._scorer_of(method))

    def _check_certificate(self, method: Method) -> None:
        """Before something is reused: warn, or refuse where one is required, unless a certificate covers it."""
        identity = self.identity(method)
        checked = (identity.digest(), method.nominal_ratio)
        if checked not in self._checked:
            check_certificate(self.config, method, identity)
            self._checked.add(checked)

    def _scorer_of(self, method: Method) -> AuxiliaryScorer | None:
        if not method.needs_auxiliary or not self.config.auxiliary:
            return None
        named = self.named_heads(method.head_sets)
        return AuxiliaryScorer(self._caches_of(self.config.auxiliary), self.head_set, named)

    def context_of(self, method: str | Method | None = None) -> ChunkContext:
        """What chunks are computed behind for a method (default the engine's): what the method says itself, else what
        the settings say. Loads no model."""
        given = self.config.method if method is None else method
        check_method(given)
        if isinstance(given, str):
            if given == DEFAULT_METHOD:
                return self._default_context  # both methods that it may be leave it to the settings
            given = preset(given)
        return given.context or self._default_context

    @property
    def _default_context(self) -> ChunkContext:
        return CONTEXTS[self.config.chunk_context]

    def chunk_caches(self, context: ChunkContext | None = None, *, with_auxiliary: bool = True) -> list[ChunkCaches]:
        """Where the KV of a chunk is kept, model by model, the primary's first; loads the models.

        Args:
            context: what chunks are computed behind for the primary; default as the engine's method wants it.
        """
        found = [self._caches_of(self.config.primary, context or self.context_of())]
        if with_auxiliary and self.config.auxiliary:
            found.append(self._caches_of(self.config.auxiliary))
        return found


def _origins(candidates: Candidates) -> dict[str, list[tuple[str, str]]]:
    """Sources and documents of each chunk, as far as they were said."""
    found: dict[str, list[tuple[str, str]]] = {}
    for text, origins in candidates.items() if isinstance(candidates, Mapping) else ():
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
