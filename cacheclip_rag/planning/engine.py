"""An engine without the primary's weights: it plans prompts for another process that has them, by the primary's
tokenizer, the store's index and the auxiliary model.

Chunks must be stored already (``cacheclip ingest``, or ``precompute`` of an engine with the weights): their KV cannot
be computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch

from ..answering.options import CallOptions, Request
from ..answering.parts import Parts
from ..answering.pipeline import Answering
from ..answering.trace import trace_of_planned
from ..answering.turns import Waiter
from ..answering.writer import ChunkWriter
from ..base.clock import PhaseClock
from ..base.closing import Closing
from ..base.database import ANSWER_WAIT_S, waiting_at_most
from ..base.errors import ConfigurationError
from ..config import EngineConfig
from ..fusion.answer import FusionStats, Trace
from ..fusion.fuse import plan_ahead
from ..fusion.wire import FusionPlan
from ..guards.base import Observer, brought_observers
from ..guards.misses import MissWarning
from ..methods.base import Method
from ..models.load import concrete, load_planning
from ..plan.plan import is_plain_better
from ..prompt.messages import Documents, Prompt
from ..prompt.segments import PromptReader, Segment, given_texts
from ..prompt.tools import check_tools
from ..runtime.transformers.planning import PlanningRuntime
from ..store import TieredStore
from .kept import KeptPrompts
from .prompts import PlannedPrompt

logger = logging.getLogger(__name__)

_SO_MUCH = "so much of the prompt that plain prefill computes less"


class PlanningEngine(Closing):
    """Plans prompts by the settings of an engine. Loads the auxiliary model if the method needs it. Safe to share
    between threads. A ``with`` block closes it at its end."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        answers: str = "the other process",
        load_primary: Callable[..., PlanningRuntime] = load_planning,
        **options: Any,
    ) -> None:
        """Settings are those of :class:`~cacheclip_rag.engine.CacheClipEngine`. ``dtype`` must be that of the process
        that answers, and ``store`` a folder or URL that it can read. Engines of several tenants may share its
        :class:`~cacheclip_rag.store.TieredStore`: ``PlanningEngine(config, store=shared)``.

        Args:
            answers: name of what has the weights, for messages.
            load_primary: called with the primary's name and ``dtype=…``, and gives it without its weights.

        Raises:
            ConfigurationError: there is no store, or a setting has no effect on answers of another process.
        """
        shared = options.pop("store") if isinstance(options.get("store"), TieredStore) else None
        self.config = EngineConfig.from_options(config, options)
        self._answers, self._load_primary = answers, load_primary
        if self.config.store is None:
            raise ConfigurationError(f"{answers}'s workers read chunks from a store, and none is set. Set store.")
        for name in ("finish", "max_ttft_s"):
            if getattr(self.config, name) not in (None, False, 0.0, "none"):
                raise ConfigurationError(f"{name} has no effect on answers of {answers}. Leave it out.")
        if self.config.fixed_ratio != self.config.recompute_ratio:
            raise ConfigurationError(f"ratios are not chosen by time for {answers}. Give recompute_ratio as a number.")
        self.parts = Parts(self.config, shared, load_primary=load_primary)
        """Store, models and caches, each made at first use."""
        self._answering = Answering(self.parts, ChunkWriter(self.parts), ())
        self.observers: list[Observer] = [
            self.parts.certificates,
            MissWarning(),
            *brought_observers(self.config),
        ]
        """Called with every plan, and with no answer: another process gives it."""
        self.kept: KeptPrompts | None = None
        """Prompts whose KV the other process keeps; None: it keeps none."""

    @property
    def primary(self) -> PlanningRuntime:
        """The primary without its weights."""
        return cast(PlanningRuntime, self.parts.models.runtime)

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | None = None) -> Method:
        """The method of a call; see :meth:`CacheClipEngine.make_method`."""
        return self.parts.choose_method(method, recompute_ratio)

    def warm_up(self) -> None:
        """Load what the settings' method needs, so that the first plan need not wait for it.

        Raises:
            ConfigurationError: no prompt could be fused with this method.
            CertificateError: the settings require a certificate, and there is none for this method and its ratio.
        """
        method = self.make_method()
        reason = self.why_never(method)
        if reason is not None:
            raise ConfigurationError(
                f"nothing would be reused: {reason}. Choose another method, such as cacheclip (with an "
                "auxiliary model) or epic."
            )
        sources = self.parts.kv_sources(method)
        self.parts.texts.index.find("Is the text index open?")
        if method.reuses_chunks and self.config.require_certificate:
            self.parts.certificates.check(method)
        self.segments("?")
        assert sources.primary.runtime is self.primary

    def keep_prompts(self) -> None:
        """The other process keeps KV of prompts that it computes plainly: prompts move it once :attr:`kept` knows."""
        self.kept = KeptPrompts(self.parts)

    def why_never(self, method: Method) -> str | None:
        """Why the other process alone can fuse no prompt with this method; None if it can, or if the method reuses no
        chunks."""
        other = self._answers
        if not method.reuses_chunks:
            return None
        if self.primary.pinned_rope:
            return f"the model's rotary frequencies depend on the length, and {other}'s differ from the stored chunks'"
        if method.min_confidence:
            return f"min_confidence needs the first token's logits before the answer, which {other} does not give"
        return None

    def segments(
        self,
        prompt: Prompt,
        *,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        as_it_stands: bool = False,
    ) -> list[Segment]:
        """A prompt cut into chunks and fresh text, for :meth:`plan`. ``as_it_stands``: it is a text without chat
        template and system prompt."""
        assert isinstance(prompt, str) or not as_it_stands, "only a text can be read as it stands"
        return self.parts.segment(
            prompt,
            given_texts(documents),
            tools=check_tools(tools),
            variables=variables,
            as_it_stands=as_it_stands,
        )

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
        moved: str | None = None,
        known: Callable[[Sequence[int]], int] = lambda ids: 0,
    ) -> PlannedPrompt:
        """Plan a prompt. Arguments are those of :meth:`CacheClipEngine.generate`.

        Args:
            moved: ``on`` or ``off``, as for an answer; None: as in the settings.
            known: of how many first tokens the other process holds exact KV. If plain prefill computes less after
                them, it is planned, and no chunk is scored.

        Raises:
            ConfigurationError: a setting is out of range. PromptTooLongError: the prompt does not fit the model.
            CertificateError: as for :meth:`CacheClipEngine.generate`.
        """
        chosen = self.make_method(method, recompute_ratio)
        clock = PhaseClock()
        options = CallOptions(question=question, documents=documents, tools=tools, moved=moved or self.config.moved)
        sources, kept = self.parts.kv_sources(chosen), self.kept
        about = None if kept is None else kept.follow()
        with clock.phase("lookup"):
            plan = self._answering.plan(Request(prompt, chosen, options))
        for observer in self.observers:
            plan = observer.on_plan(plan, sources) or plan
        with clock.phase("lookup"):
            can_move = self.why_never(chosen) is None
            plan, parts = kept.moving(plan, sources) if kept is not None and can_move else (plan, [])
        reason = plan.fallback if chosen.reuses_chunks else None
        is_used = bool(plan.reused or parts)
        if is_used:
            ids, rows = plan.layout.token_ids, plan.known.computed_tokens(chosen.nominal_ratio)
            reason = plan.bypass or self.why_never(chosen)
            if is_plain_better(len(ids) - known(ids), rows, rows):
                reason = f"{self._answers}'s own prefix cache holds {_SO_MUCH}"
        if not is_used or reason is not None:
            return replace(PlannedPrompt.plain(plan, reason, clock), kept_about=about)
        fusion = plan_ahead(self.primary, plan, sources, clock=clock, moved=parts)
        for key in plan.keys:
            self.parts.store.record_use(key)  # the workers, which read them, write nothing
        self.parts.store.flush(ANSWER_WAIT_S)  # now: until they have read it, it is what others evict last
        return replace(PlannedPrompt.fused(plan, fusion, clock), kept_about=about)

    def trace(self, planned: PlannedPrompt, stats: FusionStats) -> Trace:
        """What the KV of a planned prompt is made of, without scores. ``stats``: those of its answer, which tell
        whether the plan was carried out."""
        computed = planned.fusion.computed if planned.fusion is not None and stats.chunk_tokens else None
        sources = self.parts.kv_sources(planned.plan.method)
        return trace_of_planned(planned.plan, sources, computed, stats.cached_prefix_tokens)

    @contextmanager
    def asking(self, caller: Waiter) -> Iterator[None]:
        """Within the block, this thread plans for a caller who may leave (:class:`~cacheclip_rag.planning.CallerLeft`
        then), and waits for other processes no longer than an answer does (StoreError then)."""
        with waiting_at_most(ANSWER_WAIT_S), caller.asking():
            yield

    def drop_unreadable(self, fusion: FusionPlan) -> int:
        """Remove what cannot be read of a plan that could not be carried out, so that it is missing from the next
        plan; returns the number of removed entries. Workers themselves change nothing in the store."""
        removed = self.parts.store.drop_unreadable(list({piece.key for piece in fusion.pieces} - fusion.moved_keys))
        if removed:
            logger.warning(
                "%d chunks of a plan could not be read and were removed. Ingest their documents again.", removed
            )
        return removed

    def token_ids(self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Those of a prompt that is not planned. Needs neither store nor auxiliary model.

        Raises:
            ConfigurationError: the prompt or a tool is malformed. The errors of :func:`load_planning`.
        """
        runtime = self._load_primary(self.config.primary, dtype=concrete(self.config).dtype)
        segments = PromptReader(runtime, self.config.system_prompt).segments(prompt, None, tools=check_tools(tools))
        return runtime.tokenize_prompt(segments).ids

    def close(self) -> None:
        """Close file handles, and end what observers do. The engine may be used again afterwards."""
        with ExitStack() as closing:
            closing.callback(self.parts.close)
            for observer in reversed(self.observers):
                closing.callback(observer.close)
