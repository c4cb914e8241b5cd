"""Plans prompts for vLLM, without the primary's weights: with its tokenizer, the store's index and the auxiliary model.

Chunks must be stored already (``cacheclip ingest``, or ``precompute`` of an engine with the weights): a planner cannot
compute their KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ...answering import Answering
from ...chunks.writer import ChunkWriter
from ...clock import PhaseClock
from ...config import EngineConfig
from ...errors import ConfigurationError
from ...fusion.recompute import plan_ahead
from ...fusion_plan import FusionPlan
from ...guards.base import Observer
from ...guards.certificate import CertificateGuard
from ...guards.misses import MissWarning
from ...methods.base import Method
from ...models.load import load_planning
from ...parts import Parts
from ...plan.planner import choose_method
from ...prompt.segments import Segment
from ...sampling import SamplingParams
from ...types import Documents, Plan, Prompt, Request
from ..transformers.planning import PlanningRuntime
from .served import Served

__all__ = ["PlannedPrompt", "Planner"]


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt for vLLM."""

    token_ids: tuple[int, ...]
    """What vLLM must be given: its own tokenisation may differ where text of users looks like control tokens."""
    plan: Plan
    fusion: FusionPlan | None = None
    """How vLLM's workers make the KV of the first tokens; None: ``reason`` says why they cannot."""
    reason: str | None = None
    """Why the prompt has no fusion plan; None if it has one, or its method reuses no chunks."""
    needs_engine: bool = False
    """Whether an engine with the primary's weights could fuse the prompt nevertheless."""


class Planner:
    """Plans prompts by the settings of an engine. Loads the auxiliary model if the method needs it."""

    def __init__(self, config: EngineConfig | None = None, *, served: Served | None = None, **options: Any) -> None:
        """Settings are those of :class:`~cacheclip_rag.engine.CacheClipEngine`. ``dtype`` must be vLLM's, and ``store``
        a folder that vLLM's workers can read.

        Args:
            served: what vLLM runs; default a CPU without quantisation. A
                :class:`~cacheclip_rag.runtime.vllm.offline.FusedLLM` tells it by :meth:`serve`.

        Raises:
            ConfigurationError: there is no store, primary and auxiliary are one model, or a setting has no effect on
                vLLM's answers.
        """
        self.config = EngineConfig.from_options(config, options)
        if self.config.store is None:
            raise ConfigurationError("vLLM's workers read chunks from a store folder, and none is set. Set store.")
        if self.config.auxiliary == self.config.primary:
            raise ConfigurationError(
                "a planner has no weights of the primary, so that it cannot score with it. Set another auxiliary."
            )
        for name in ("finish", "max_ttft_s", "hide_hits"):
            if getattr(self.config, name) not in (None, False, 0.0, "none"):
                raise ConfigurationError(f"{name} has no effect on answers of vLLM. Leave it out.")
        if self.config.fixed_ratio != self.config.recompute_ratio:
            raise ConfigurationError("ratios are not chosen by time for vLLM. Give recompute_ratio as a number.")
        self.served = served or Served()
        """What vLLM runs: part of the keys of stored chunks (quantisation) and of the certificate's identity."""
        self._is_loaded = False
        self.parts = Parts(self.config, load_primary=self._load_primary)
        """Store, models and caches, each made at first use."""
        self._answering = Answering(self.parts, ChunkWriter(self.parts), ())
        self._observers: tuple[Observer, ...] = (CertificateGuard(self.config), MissWarning())

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
        return cast(PlanningRuntime, self.parts.prefix_caches.runtime)

    def make_method(self, method: str | Method | None = None, recompute_ratio: float | None = None) -> Method:
        """The method of a call; see :meth:`CacheClipEngine.make_method`."""
        return choose_method(self.config, method, recompute_ratio, lambda: self.parts.has_head_set)

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
        if chosen.composes:
            raise ConfigurationError(
                f"method {chosen.name!r} answers by several prompts, which vLLM cannot be given as one. Choose another "
                "method."
            )
        clock = PhaseClock()
        request = Request(prompt, SamplingParams(), chosen, question, documents, tools=tools)
        sources = self.parts.sources(chosen)
        plan = self._answering.plan(request, sources, clock)
        for observer in self._observers:
            observer.on_plan(plan, sources)
        ids = plan.layout.token_ids
        if not chosen.reuses_chunks:
            return PlannedPrompt(ids, plan)
        if not plan.reused:
            return PlannedPrompt(ids, plan, reason=plan.fallback)
        reason = self._obstacle(plan)
        if reason is not None:
            return PlannedPrompt(ids, plan, reason=reason)
        reason = _needs_engine(chosen)
        if reason is not None:
            return PlannedPrompt(ids, plan, reason=reason, needs_engine=True)
        fusion = plan_ahead(self.primary, plan, sources, clock=clock)
        for piece in fusion.pieces:
            self.parts.store.record_use(piece.key)  # the workers, which read them, write nothing
        return PlannedPrompt(ids, plan, fusion)

    def close(self) -> None:
        """Close file handles; the planner may be used again afterwards."""
        self.parts.close()

    def _obstacle(self, plan: Plan) -> str | None:
        """Why vLLM cannot decode what the method makes; None if it can."""
        if self.primary.pinned_rope:
            return "the model's rotary frequencies depend on the length, and vLLM's differ from the stored chunks'"
        if plan.method.positions(plan.layout, plan.reused) is not None:
            return f"method {plan.method.name!r} changes positions or attention, which vLLM cannot decode with"
        return None


def _needs_engine(method: Method) -> str | None:
    """Why the method needs an engine with the primary's weights; None if it does not."""
    if not method.plans_ahead:
        return f"method {method.name!r} chooses tokens by the primary's KV, which only an engine with its weights has"
    if method.min_confidence:
        return "min_confidence needs the first token's logits before the answer, which vLLM does not give"
    return None
