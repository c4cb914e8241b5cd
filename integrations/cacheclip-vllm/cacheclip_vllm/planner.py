"""Plans prompts for vLLM, without the primary's weights: with its tokenizer, the store's index and the auxiliary model.

Chunks must be stored already (``cacheclip ingest``, or ``precompute`` of an engine with the weights): a planner cannot
compute their KV.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from cacheclip_rag.answering.options import CallOptions, Request
from cacheclip_rag.answering.parts import Parts
from cacheclip_rag.answering.pipeline import Answering
from cacheclip_rag.answering.prefill import stats_of
from cacheclip_rag.answering.writer import ChunkWriter
from cacheclip_rag.base.clock import PhaseClock
from cacheclip_rag.base.database import ANSWER_WAIT_S
from cacheclip_rag.base.errors import ConfigurationError
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.fusion.answer import FusionStats
from cacheclip_rag.fusion.fuse import plan_ahead
from cacheclip_rag.fusion.wire import FusionPlan
from cacheclip_rag.guards.base import Observer
from cacheclip_rag.guards.certificate import CertificateGuard, check_certificate
from cacheclip_rag.guards.misses import MissWarning
from cacheclip_rag.methods.base import Method
from cacheclip_rag.models.load import concrete, load_planning
from cacheclip_rag.plan.plan import Plan
from cacheclip_rag.prompt.known_kv import known_kv
from cacheclip_rag.prompt.messages import Documents, Prompt
from cacheclip_rag.prompt.segments import PromptReader, Segment, given_texts, tokenize_whole
from cacheclip_rag.prompt.tools import check_tools
from cacheclip_rag.runtime.transformers.planning import PlanningRuntime
from cacheclip_rag.store import TieredStore

from .served import Served

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt for vLLM."""

    token_ids: tuple[int, ...]
    """What vLLM must be given: its own tokenisation may differ where text of users looks like control tokens."""
    plan: Plan
    stats: FusionStats
    """What is known before vLLM has the prompt: tokens, hits and misses, and the seconds of planning (``ttft_s``)."""
    fusion: FusionPlan | None = None
    """How vLLM's workers make the KV of the first tokens; None: ``reason`` says why they cannot."""
    reason: str | None = None
    """Why the prompt has no fusion plan; None if it has one, or its method reuses no chunks."""

    def stats_of(self, told: Mapping[str, Any]) -> FusionStats:
        """The statistics of a fused answer, by what vLLM told of it: the KV that it continued."""
        known = told.get("continued_tokens", 0)
        if not known or self.fusion is None:
            return self.stats
        chunks = sum(max(0, min(span.stop, known) - span.start) for span in self.plan.reused)
        prefix = max(known - chunks, self.stats.prefix_tokens)
        computed = _computed_of_chunks(self.plan, self.fusion, known)
        return replace(
            self.stats,
            prefix_tokens=prefix,
            fresh_tokens=self.stats.prompt_tokens - prefix - self.stats.chunk_tokens,
            recomputed_tokens=computed,
            charged_ratio=computed / self.stats.chunk_tokens,
            continued_tokens=known,
            continued_turns=told.get("continued_turns", 0),
            stale_from=told.get("stale_from"),
        )


class Planner:
    """Plans prompts by the settings of an engine. Loads the auxiliary model if the method needs it."""

    def __init__(self, config: EngineConfig | None = None, *, served: Served | None = None, **options: Any) -> None:
        """Settings are those of :class:`~cacheclip_rag.engine.CacheClipEngine`. ``dtype`` must be vLLM's, and ``store``
        a folder or URL that vLLM's workers can read. Planners of several tenants may share its
        :class:`~cacheclip_rag.store.TieredStore`: ``Planner(config, store=shared)``.

        Args:
            served: what vLLM runs; default a CPU without quantisation. A
                :class:`~cacheclip_vllm.offline.FusedLLM` tells it by :meth:`serve`.

        Raises:
            ConfigurationError: there is no store, or a setting has no effect on vLLM's answers.
        """
        shared = options.pop("store") if isinstance(options.get("store"), TieredStore) else None
        self.config = EngineConfig.from_options(config, options)
        if self.config.store is None:
            raise ConfigurationError("vLLM's workers read chunks from a store, and none is set. Set store.")
        for name in ("finish", "max_ttft_s"):
            if getattr(self.config, name) not in (None, False, 0.0, "none"):
                raise ConfigurationError(f"{name} has no effect on answers of vLLM. Leave it out.")
        if self.config.fixed_ratio != self.config.recompute_ratio:
            raise ConfigurationError("ratios are not chosen by time for vLLM. Give recompute_ratio as a number.")
        self.served = served or Served()
        """What vLLM runs: part of the keys of stored chunks (quantisation) and of the certificate's identity."""
        self._is_loaded = False
        self.parts = Parts(self.config, shared, load_primary=self._load_primary)
        """Store, models and caches, each made at first use."""
        self._answering = Answering(self.parts, ChunkWriter(self.parts), ())
        self.observers: list[Observer] = [CertificateGuard(self.config), MissWarning()]
        """Called with every plan."""

    def _load_primary(self, name: str, *, dtype: str) -> PlanningRuntime:
        self._is_loaded = True
        return load_planning(name, dtype=dtype, quantization=self.served.quantization, backend=self.served.label)

    def serve(self, served: Served) -> None:
        """Say what vLLM runs, before the first plan.

        Raises:
            ConfigurationError: prompts were planned for another vLLM already.
        """
        if served != self.served and self._is_loaded:
            raise ConfigurationError(
                f"the planner has planned for {self.served.label}, and this is {served.label}. Make a planner for "
                "each, or give it served."
            )
        self.served = served

    @property
    def primary(self) -> PlanningRuntime:
        """The primary without its weights."""
        return cast(PlanningRuntime, self.parts.runtime)

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | None = None) -> Method:
        """The method of a call; see :meth:`CacheClipEngine.make_method`."""
        return self.parts.choose_method(method, recompute_ratio)

    def warm_up(self) -> None:
        """Load what the settings' method needs, so that the first plan need not wait for it.

        Raises:
            ConfigurationError: vLLM could fuse no prompt with this method.
            CertificateError: the settings require a certificate, and there is none for this method and its ratio.
        """
        method = self.make_method()
        reason = self.why_never(method)
        if reason is not None:
            raise ConfigurationError(
                f"nothing would be reused: {reason}. Choose a method that chooses tokens without the primary's KV, for "
                "instance cacheclip (with an auxiliary model) or epic."
            )
        sources = self.parts.kv_sources(method)
        self.parts.texts.index.find("Is the text index open?")
        if method.reuses_chunks and self.config.require_certificate:
            check_certificate(self.config, method, self.parts.certificates.identity(method))
        self.segments("?", method=method)
        assert sources.primary.runtime is self.primary

    def why_never(self, method: Method) -> str | None:
        """Why vLLM alone can fuse no prompt with this method; None if it can, or if the method reuses no chunks."""
        if not method.reuses_chunks:
            return None
        return self._obstacle(method) or _needs_weights(method)

    def segments(
        self,
        prompt: Prompt,
        *,
        method: str | Method | None = None,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        as_it_stands: bool = False,
    ) -> list[Segment]:
        """A prompt cut into chunks and fresh text, for :meth:`plan` with the same method. ``as_it_stands``: it is a
        text without chat template and system prompt."""
        chosen = method if isinstance(method, Method) else self.make_method(method)
        isolated = self.parts.context_of(chosen).isolated
        given = given_texts(documents)
        if not as_it_stands:
            checked = check_tools(tools)
            return self.parts.segment(prompt, given, tools=checked, variables=variables, isolated=isolated)
        assert isinstance(prompt, str), "only a text can be read as it stands"
        return self.parts.segment_as_it_stands(prompt, given, isolated=isolated)

    @torch.inference_mode()
    def plan(
        self,
        prompt: Prompt | Sequence[Segment],
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PlannedPrompt:
        """Plan a prompt. Arguments are those of :meth:`CacheClipEngine.generate`.

        Raises:
            ConfigurationError: a setting is out of range. PromptTooLongError: the prompt does not fit the model.
            CertificateError: as for :meth:`CacheClipEngine.generate`.
        """
        chosen = self.make_method(method, recompute_ratio)
        clock = PhaseClock()
        request = Request(prompt, chosen, CallOptions(question=question, documents=documents, tools=tools))
        sources = self.parts.kv_sources(chosen)
        with clock.phase("lookup"):
            plan = self._answering.plan(request)
        for observer in self.observers:
            observer.on_plan(plan, sources)
        ids = plan.layout.token_ids
        reason = plan.fallback if chosen.reuses_chunks else None
        if plan.reused:
            reason = self._obstacle(chosen) or _needs_weights(chosen)
        if not plan.reused or reason is not None:
            return PlannedPrompt(ids, plan, _plain_stats(plan, reason, clock), None, reason)
        fusion = plan_ahead(self.primary, plan, sources, clock=clock)
        for piece in fusion.pieces:
            self.parts.store.record_use(piece.key)  # the workers, which read them, write nothing
        self.parts.store.flush(ANSWER_WAIT_S)  # now: until they have read it, it is what others evict last
        computed = _computed_of_chunks(plan, fusion)
        return PlannedPrompt(ids, plan, stats_of(plan, clock, None, computed, computed), fusion)

    def drop_unreadable(self, fusion: FusionPlan) -> int:
        """Remove what cannot be read of a plan that vLLM's workers could not carry out, so that it is missing from the
        next plan; returns the number of removed entries. Workers themselves change nothing in the store."""
        found = self.parts.store.drop_unreadable(list(dict.fromkeys(piece.key for piece in fusion.pieces)))
        if found:
            logger.warning(
                "%d chunks of a plan could not be read and were removed. Ingest their documents again.", found
            )
        return found

    def token_ids(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Those of a prompt that is not planned. Needs neither store nor auxiliary model.

        Raises:
            ConfigurationError: the prompt or a tool is malformed. The errors of :func:`load_planning`.
        """
        runtime = self._load_primary(self.config.primary, dtype=concrete(self.config).dtype)
        segments = PromptReader(runtime, self.config.system_prompt).segments(prompt, None, tools=check_tools(tools))
        return tuple(tokenize_whole(segments, runtime).ids)

    def close(self) -> None:
        self.parts.close()

    def _obstacle(self, method: Method) -> str | None:
        """Why vLLM cannot decode what the method makes; None if it can."""
        if type(method).positions is not Method.positions:
            return f"method {method.name!r} changes positions or attention, which vLLM cannot decode with"
        if self.primary.pinned_rope:
            return "the model's rotary frequencies depend on the length, and vLLM's differ from the stored chunks'"
        return None


def _needs_weights(method: Method) -> str | None:
    """Why the method needs the primary's weights before vLLM has the prompt; None if it does not."""
    if not method.plans_ahead:
        return f"method {method.name!r} chooses tokens by the primary's KV, which a planner does not have"
    if method.min_confidence:
        return "min_confidence needs the first token's logits before the answer, which vLLM does not give"
    return None


def _plain_stats(plan: Plan, reason: str | None, clock: PhaseClock) -> FusionStats:
    """Statistics of a prompt that vLLM prefills in full. Hits are those of the plan, as if it were carried out."""
    hits = stats_of(plan, clock)
    nothing = known_kv(replace(plan.layout, num_prefix=0))
    stats = stats_of(replace(plan, known=nothing, keys=()), clock)
    reuses = plan.method.reuses_chunks
    return replace(
        stats,
        method="full" if reuses else stats.method,
        fallback=reason,
        hits=hits.hits,
        misses=hits.misses if reuses else 0,
        missed_tokens=hits.missed_tokens if reuses else 0,
        charged_ratio=1.0,
    )


def _computed_of_chunks(plan: Plan, fusion: FusionPlan, known: int = 0) -> int:
    """Number of computed tokens in reused chunks, from position ``known`` on."""
    return sum(
        max(0, min(stop, span.stop) - max(start, span.start, known))
        for start, stop in fusion.computed
        for span in plan.reused
    )
