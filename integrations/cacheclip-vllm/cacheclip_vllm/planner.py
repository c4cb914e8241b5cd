"""Plans prompts for vLLM: an engine without the primary's weights that knows how vLLM runs them."""

from __future__ import annotations

from typing import Any

from cacheclip_rag import ConfigurationError, EngineConfig
from cacheclip_rag.planning import PlannedPrompt, PlanningEngine, PlanningRuntime, load_planning

from .kept import GONE
from .served import Served


class Planner(PlanningEngine):
    """Plans prompts by the settings of an engine. Loads the auxiliary model if the method needs it.

    Chunks must be stored already (``cacheclip ingest``, or ``precompute`` of an engine with the weights): a planner
    cannot compute their KV.
    """

    def __init__(self, config: EngineConfig | None = None, *, served: Served | None = None, **options: Any) -> None:
        """Settings are those of :class:`~cacheclip_rag.CacheClipEngine`. ``dtype`` must be vLLM's, and ``store``
        a folder or URL that vLLM's workers can read. Planners of several tenants may share its
        :class:`~cacheclip_rag.store.TieredStore`: ``Planner(config, store=shared)``.

        Args:
            served: what vLLM runs; default a CPU without quantisation. A
                :class:`~cacheclip_vllm.offline.FusedLLM` tells it by :meth:`serve`.

        Raises:
            ConfigurationError: there is no store, or a setting has no effect on vLLM's answers.
        """
        super().__init__(config, answers="vLLM", load_primary=self._load_served, **options)
        self.served = served or Served()
        """What vLLM runs: part of the keys of stored chunks (quantisation) and of the certificate's identity."""
        self._is_loaded = False

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

    def note(self, planned: PlannedPrompt, outcome: object, reason: object, num_cached: int) -> None:
        """What became of a prompt in vLLM, which had so many of its first tokens in its own prefix cache: later prompts
        may move the KV that its workers keep of it."""
        if self.kept is None:
            return
        is_moved = planned.fusion is not None and bool(planned.fusion.moved)
        if reason == GONE or (is_moved and outcome == "plain"):
            self.kept.forget()
        if planned.fusion is None or outcome == "exact" or reason == GONE:
            self.kept.add(planned, num_cached)

    def erasures(self) -> object:
        """What changes when texts of the tenant are erased, by whatever process."""
        return self.parts.store.catalog.erasures(self.config.namespace)

    def _load_served(self, name: str, *, dtype: str) -> PlanningRuntime:
        self._is_loaded = True
        return load_planning(name, dtype=dtype, quantization=self.served.quantization, backend=self.served.label)
