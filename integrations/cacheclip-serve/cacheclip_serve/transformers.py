"""Answers by this package's engine, in this process: one question after the other, tokens side by side
(:mod:`cacheclip_rag.answering.turns`)."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from cacheclip_care import explain_miss, plausible

from cacheclip_rag import Answer, CacheClipEngine, CallOptions, ConfigurationError, EngineConfig, Event
from cacheclip_rag.adapters import (
    can_constrain,
    final_events,
    iterate_in_thread,
    room_for,
    uses_tools,
)
from cacheclip_rag.guards import Metrics, Observer
from cacheclip_rag.models import free_bytes
from cacheclip_rag.store import layer_shapes, open_chunk_store

from .backend import ModelCard, ServedQuestion, ServingBackend
from .hidden import names_of, renamed, without_hits, without_paths
from .inspection import CANCELLED, Inspection
from .learning import LearnedTexts

_SHARE_FOR_KV = 0.5
"""Share of the memory that is free at the start for the KV of running answers. The rest is for activations, the prefix
cache and stored KV that is being read."""
_BYTES_OF_TOKEN = 3
"""Bytes of text in a token, or a few less, by which prompts are estimated: a question waits before its tokens are
known. A Chinese character, often a token, has three."""


INSPECTED = "inspect"
"""Source of texts that were stored from the page of an answer."""


@dataclass(eq=False, slots=True)
class EngineSeen(Observer):
    """Tells an inspection what full prefill chooses along answers of an engine, and of answers whose clients left."""

    engine: CacheClipEngine
    inspection: Inspection

    def on_cancelled(self, answer: Answer) -> None:
        CANCELLED.get()(answer)

    def on_compared(self, token_ids: Sequence[int], choices: Sequence[int]) -> None:
        self.inspection.compare(token_ids, choices, self.engine.primary.decode_ids)


class TransformersBackend(ServingBackend):
    """An engine for each tenant. They share weights, store and queue; prefix caches are their own, under one limit."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        hide_hits: bool = False,
        learned_bytes: int = 0,
        inspection: Inspection | None = None,
    ) -> None:
        """The settings' namespace is that of the server's own tenant. ``hide_hits``: answers do not tell which chunks
        were stored (:mod:`.hidden`). ``learned_bytes``: most bytes of learned texts a tenant; 0: none is learned.
        ``inspection``: is told of comparisons with full prefill, and of erasures."""
        self._config, self._hide_hits, self._learned_bytes = config, hide_hits, learned_bytes
        self._names, self._inspection = names_of(config), inspection
        self._store = open_chunk_store(config.store, config.max_bytes, config.memory_bytes, config.codec)
        if inspection is not None:
            inspection.watch(self._store)
        self._engines: dict[str, CacheClipEngine] = {}
        self._lock = threading.Lock()

    def engine(self, tenant: str) -> CacheClipEngine:
        """The engine of a tenant, made at first use."""
        with self._lock:
            if tenant not in self._engines:
                engine = CacheClipEngine(replace(self._config, namespace=tenant), store=self._store)
                if self._learned_bytes:
                    engine.observers.append(LearnedTexts(engine, self._learned_bytes))
                if self._inspection is not None:
                    engine.observers.append(EngineSeen(engine, self._inspection))
                if self._engines:
                    engine.prefixes.share_limit(next(iter(self._engines.values())).prefixes)
                self._engines[tenant] = engine
            return self._engines[tenant]

    def start(self) -> ModelCard:
        engine = self.engine(self._config.namespace)
        engine.warm_up()
        runtime = engine.primary
        free = free_bytes(str(runtime.device))
        return ModelCard(
            runtime.context_tokens,
            uses_tools(runtime),
            runtime.can_constrain and can_constrain(),
            runtime.template_variables,
            math.inf if free is None else _SHARE_FOR_KV * free,
        )

    def kv_bytes(self, question: ServedQuestion) -> int:
        runtime = self.engine(self._config.namespace).primary
        tokens = self.work_tokens(question) + room_for(question.options.params)
        size = 1 if runtime.kv_codec else runtime.dtype.itemsize  # KV that is opaque is counted in bytes
        of_token = sum(each.num_numbers for each in layer_shapes(runtime.kv_shape(1))) * size
        return min(tokens, runtime.context_tokens) * of_token

    def work_tokens(self, question: ServedQuestion) -> int:
        prompt = question.prompt
        messages = [] if isinstance(prompt, str) else prompt
        contents = [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]
        contents += [json.dumps(each) for each in question.options.tools]
        contents += [json.dumps(calls) for message in messages if (calls := message.get("tool_calls"))]
        return sum(len(content.encode("utf-8", "replace")) for content in contents) // _BYTES_OF_TOKEN

    def count_tokens(self, question: ServedQuestion) -> int:
        options = replace(question.options, method="full", recompute_ratio=None, max_ttft_s=None)
        return self.engine(question.tenant).plan(question.prompt, options=options).layout.num_tokens

    def why(self, question: ServedQuestion, text: str) -> str:
        engine = self.engine(question.tenant)
        stored = chain(engine.texts.index.texts(), engine.texts.texts())
        near = plausible(stored, text)[:1] or [text]
        report = explain_miss(engine, question.prompt, near[0])
        says = renamed(report.explanation, self._names)
        return says if near[0] == text else f"The stored text {report.text!r} is near: {says}"

    def learn(self, tenant: str, text: str) -> None:
        self.engine(tenant).precompute([text], source=INSPECTED)

    async def answer(self, question: ServedQuestion) -> AsyncGenerator[Event, None]:
        stream = iterate_in_thread(
            lambda: without_paths(lambda: self._events(question), self._names),
            joins=True,
            in_background=question.in_background,
        )
        async with aclosing(stream) as events:
            async for event in events:
                yield event

    def metrics(self) -> str:
        with self._lock:
            engines = list(self._engines.values())
        return Metrics.together([engine.metrics for engine in engines]).to_prometheus()

    def close(self) -> None:
        with ExitStack() as closing:  # of every tenant, also after an error
            for engine in self._engines.values():
                closing.callback(engine.close)

    def _events(self, question: ServedQuestion) -> Iterator[Event]:
        engine, options = self.engine(question.tenant), question.options
        prompt: Sequence[Any] | str = question.prompt
        if isinstance(prompt, str):
            prompt = engine.segment(prompt, options.documents, as_it_stands=True)
        if self._hide_hits and options.logprobs is not None:
            raise ConfigurationError("logprobs are not given here: they would tell which chunks are stored.")
        if question.min_confidence is not None:
            options = _with_confidence(engine, options, question.min_confidence)
        stream = engine.stream(prompt, options=options)
        if self._hide_hits:
            ratio = options.recompute_ratio
            method = engine.make_method(options.method, None if isinstance(ratio, str) else ratio)
            finish = options.finish or engine.config.finish
            stream = without_hits(stream, method=method.name, nominal_ratio=method.nominal_ratio, finish=finish)
        return final_events(stream, one_call=question.one_call)


def _with_confidence(engine: CacheClipEngine, options: CallOptions, least: float) -> CallOptions:
    """The options with a client's least confidence. It belongs to a method, and an instance takes the place of the
    settings' ratio and limit."""
    ratio, limit = options.recompute_ratio, options.max_ttft_s
    method = engine.make_method(options.method, ratio)
    if engine.config.min_confidence is not None:  # what the operator set is the least for all clients
        least = max(least, method.min_confidence)
    if ratio is None and limit is None and engine.config.fixed_ratio is None:
        ratio, limit = engine.config.recompute_ratio, engine.config.max_ttft_s
    elif not isinstance(ratio, str):
        ratio = None  # the instance has it
    return replace(options, method=replace(method, min_confidence=least), recompute_ratio=ratio, max_ttft_s=limit)
