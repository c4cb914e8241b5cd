"""Answers by this package's engine, in this process: one question after the other, tokens side by side
(:mod:`cacheclip_rag.runtime.turns`)."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..engine import CacheClipEngine
from ..frontend.aio import iterate_in_thread
from ..frontend.finishing import final_events
from ..frontend.tools import can_constrain, uses_tools
from ..guards.metrics import Metrics
from ..prompt.segments import Segment, given_texts
from ..sampling import SamplingParams
from ..store import ChunkStore
from ..types import Event, Message
from .backend import Asked, Backend, ModelCard
from .field import CacheClipField
from .hidden import without_hits

__all__ = ["TransformersBackend"]


class TransformersBackend(Backend):
    """An engine for each tenant. They share weights, store and queue; prefix caches are their own."""

    def __init__(self, config: EngineConfig, *, hide_hits: bool = False) -> None:
        """
        Args:
            config: settings of the engines; its namespace is that of the server's own tenant.
            hide_hits: whether answers do not tell which chunks were stored (:mod:`.hidden`).
        """
        self._config, self._hide_hits = config, hide_hits
        self._store = ChunkStore.open(
            Path(config.store) if config.store else None, config.max_bytes, config.memory_bytes
        )
        self._engines: dict[str, CacheClipEngine] = {}
        self._lock = threading.Lock()

    def engine(self, tenant: str) -> CacheClipEngine:
        """The engine of a tenant, made at first use."""
        with self._lock:
            if tenant not in self._engines:
                self._engines[tenant] = CacheClipEngine(replace(self._config, namespace=tenant), store=self._store)
            return self._engines[tenant]

    def start(self) -> ModelCard:
        engine = self.engine(self._config.namespace)
        engine.warm_up()
        runtime = engine.primary
        return ModelCard(runtime.context_tokens, uses_tools(runtime), runtime.can_constrain and can_constrain())

    async def answer(self, asked: Asked) -> AsyncGenerator[Event, None]:
        async with aclosing(iterate_in_thread(lambda: self._events(asked))) as events:
            async for event in events:
                yield event

    def metrics(self) -> str:
        with self._lock:
            engines = list(self._engines.values())
        return Metrics.together([engine.metrics for engine in engines]).to_prometheus()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _events(self, asked: Asked) -> Iterator[Event]:
        engine, given = self.engine(asked.tenant), asked.field
        options = dict(asked.options)
        tools = options.pop("tools", ())
        prompt: str | Sequence[Message] | list[Segment] = asked.prompt
        if isinstance(prompt, str):
            parts = not engine.context_of(given.method).isolated
            prompt = engine.parts.segment_as_it_stands(prompt, given_texts(given.documents), parts=parts)
        reuse = _reuse(engine, given)
        stream = engine.stream(
            prompt,
            SamplingParams().with_options(options),
            question=given.question,
            documents=given.documents,
            finish=given.finish,
            tools=tools,
            **reuse,
        )
        if self._hide_hits:
            method = engine.make_method(reuse["method"], _number(reuse["recompute_ratio"]))
            stream = without_hits(
                stream,
                method=method.name,
                nominal_ratio=method.nominal_ratio,
                finish=given.finish or engine.config.finish,
            )
        return final_events(stream, one_call=asked.one_call)


def _number(ratio: float | str | None) -> float | None:
    return None if isinstance(ratio, str) else ratio


def _reuse(engine: CacheClipEngine, given: CacheClipField) -> dict[str, Any]:
    """Method, ratio and time limit of a call."""
    options: dict[str, Any] = {"method": given.method, "recompute_ratio": given.ratio, "max_ttft_s": given.max_ttft_s}
    if given.min_confidence is None:
        return options
    # a confidence belongs to a method, and an instance takes the place of the settings' ratio and limit
    method = engine.make_method(given.method, given.ratio)
    least = given.min_confidence
    if engine.config.min_confidence is not None:  # what the operator set is the least for all clients
        least = max(least, method.min_confidence)
    options["method"] = replace(method, min_confidence=least)
    if given.ratio is None and given.max_ttft_s is None and engine.config.fixed_ratio is None:
        options |= {"recompute_ratio": engine.config.recompute_ratio, "max_ttft_s": engine.config.max_ttft_s}
    elif not isinstance(given.ratio, str):
        options["recompute_ratio"] = None  # the instance has it
    return options
