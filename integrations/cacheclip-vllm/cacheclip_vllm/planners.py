"""Plans prompts on their way to vLLM: a planner for each tenant, a few prompts at once in threads of their own."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cacheclip_serve import CacheClipField, Queue, QueueFull, RequestError, error_of, exposition, names_of, renamed

from cacheclip_rag import CertificateError, ConfigurationError, PromptTooLongError
from cacheclip_rag.adapters import uses_tools
from cacheclip_rag.guards import Metrics
from cacheclip_rag.methods import Method
from cacheclip_rag.planning import CallerLeft, FusionPlan, PlannedPrompt, PlanningRuntime, Waiter
from cacheclip_rag.store import open_chunk_store

from .once import WarnOnce
from .planner import Planner
from .requests import NotPlanned, PlannablePrompt
from .settings import ServerSettings

if TYPE_CHECKING:
    from .replies import Result

logger = logging.getLogger(__name__)

_THREADS = 2
"""Prompts that are planned at once, so that a short one need not wait for a long one."""
_MOST_WAITING = 64
"""Prompts of one tenant that wait for their plan; more are prefilled in full, which needs no wait."""
_MOST_REASONS = 50
"""Reasons that are counted apart."""
_LOOPS_OVER_PARTS = re.compile(r"\bfor\b[^%]*\bin\b[^%]*content|\bmacro\b")
"""What every chat template has that loops over parts of contents, which vLLM finds out from the template; others may
have it too."""
_NOT_PLANNED = "answering by plain prefill, because planning failed: %s"


@dataclass(frozen=True, slots=True)
class Route:
    """How a prompt goes to vLLM."""

    planned: PlannedPrompt | None = None
    """None: as it came."""
    reason: str | None = None
    """Why it has no fusion plan; None if it has one, or asked for plain prefill."""
    queued_s: float = 0.0
    """Seconds in which it waited for other prompts."""
    planning_s: float = 0.0
    erasures: object = None
    """:meth:`~cacheclip_vllm.planner.Planner.erasures` before it was planned."""
    asked: PlannablePrompt | None = None
    """None: it could not be read."""


class Planning:
    """The planners of a server. All methods but :meth:`plan` and :meth:`token_ids` block."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        config = settings.config
        self._names = names_of(config)
        assert config.store is not None, "a planner needs a store folder"
        self.store = open_chunk_store(config.store, config.max_bytes, config.memory_bytes, config.codec)
        """Of all planners."""
        self._planners: dict[str, Planner] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, "cacheclip-plan")
        self._checker = ThreadPoolExecutor(1, "cacheclip-check")
        self._warn_once = WarnOnce(logger)
        self._checking: Future[None] | None = None
        self._queue = Queue(_THREADS, _MOST_WAITING)
        self.metrics = Metrics(lambda: self.store.stats().tiers)
        """Counters over all answers."""
        self._outcomes: Counter[str] = Counter()
        self._plain: Counter[str] = Counter()

    def planner(self, tenant: str) -> Planner:
        """The planner of a tenant, made at first use."""
        with self._lock:
            if tenant not in self._planners:
                config = replace(self._settings.planner_config, namespace=tenant)
                self._planners[tenant] = Planner(config, store=self.store, served=self._settings.served)
                if self._settings.prompt_bytes:
                    self._planners[tenant].keep_prompts()
            return self._planners[tenant]

    @property
    def waiting(self) -> int:
        """Prompts that wait for their plan, or are being planned."""
        return self._queue.waiting + self._queue.running

    def context_tokens(self) -> int:
        """Of the model's folder; vLLM may be told a shorter one."""
        return self.planner(self._settings.config.namespace).primary.context_tokens

    def start(self) -> None:
        """Load what the first plan needs. Raises the errors of :meth:`Planner.warm_up`."""
        self._threads.submit(self.planner(self._settings.config.namespace).warm_up).result()

    def uses_tools(self) -> bool:
        """Whether tools can be given to the model, and its calls of them are read."""
        return self._settings.calls_tools and uses_tools(self.planner(self._settings.config.namespace).primary)

    def close(self) -> None:
        """End the threads. Plans that are being made are finished first."""
        for threads in (self._threads, self._checker):
            threads.shutdown(wait=True, cancel_futures=True)
        with ExitStack() as closing:  # of every tenant, also after an error
            for planner in self._planners.values():
                closing.callback(planner.close)

    async def plan(
        self,
        asked: PlannablePrompt,
        field: CacheClipField,
        tenant: str,
        known: Callable[[Sequence[int]], int] = lambda ids: 0,
    ) -> Route:
        """Plan a prompt. Whatever goes wrong in planning is plain prefill, and logged once. ``known``: of how many
        first tokens of a prompt vLLM holds exact KV, as far as is known here. Raises RequestError: the request asks for
        what cannot be, or its prompt is too long."""
        came = time.perf_counter()
        caller = Waiter()
        try:
            async with self._queue.place(tenant):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, self._way, asked, field, tenant, known, came, caller)
        except QueueFull:
            return Route(reason="too many prompts wait to be planned", asked=asked)
        finally:
            caller.leave()

    def check(self, way: Route, tenant: str) -> None:
        """Remove what cannot be read of a plan that vLLM did not carry out, so that it is missing from the next plan.
        Returns at once; plans wait for it. One check waits at a time, because failures may
        have other causes; a chunk that is left out is checked at its next failure."""
        assert way.planned is not None and way.planned.fusion is not None, "vLLM was given a plan"
        if self._checking is None or self._checking.done():
            with suppress(RuntimeError):  # the server is closing
                self._checking = self._checker.submit(self._drop_unreadable, way.planned.fusion, tenant)

    def _drop_unreadable(self, fusion: FusionPlan, tenant: str) -> None:
        try:
            planner = self.planner(tenant)
            with planner.asking(Waiter()):
                planner.drop_unreadable(fusion)
                if fusion.moved and planner.kept is not None:
                    planner.kept.forget()
        except Exception as error:
            self._warn_once("the chunks of a failed plan could not be checked: %s", error, traced=True)

    async def token_ids(self, *texts: str) -> list[tuple[int, ...]]:
        """Token ids of texts of the model, in a thread of the plans."""
        runtime = self.planner(self._settings.config.namespace).primary

        def tokenized() -> list[tuple[int, ...]]:
            return [runtime.tokenize(text).ids for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._threads, tokenized)

    def _way(
        self,
        asked: PlannablePrompt,
        field: CacheClipField,
        tenant: str,
        known: Callable[[Sequence[int]], int],
        came: float,
        caller: Waiter,
    ) -> Route:
        if self._checking is not None:
            wait([self._checking])
        began = time.perf_counter()
        planned: PlannedPrompt | None = None
        erasures: object = None
        try:
            planner = self.planner(tenant)
            with planner.asking(caller):
                erasures = planner.erasures() if self._settings.completes(field.finish) else None
                planned = self._planned(planner, asked, field, _method(planner, field), known)
                planned = _without_paths(planned, self._names)
            reason = planned.reason
        except CallerLeft:
            raise
        except (RequestError, PromptTooLongError) as error:
            refused = error_of(error)
            refused.message = renamed(refused.message, self._names)
            raise refused from None
        except NotPlanned as error:
            reason = str(error)
        except ConfigurationError as error:  # of messages or tools
            reason = "prompt that cannot be planned"
            logger.debug("answering by plain prefill: %s", error)
        except CertificateError as error:
            reason = "no certificate"
            self._warn_once(_NOT_PLANNED, error, traced=True)
        except Exception as error:  # vLLM answers what we cannot plan
            reason = "planning failed"
            self._warn_once(_NOT_PLANNED, error, traced=True)
        return Route(planned, reason, began - came, time.perf_counter() - began, erasures, asked)

    def _planned(
        self,
        planner: Planner,
        asked: PlannablePrompt,
        field: CacheClipField,
        method: Method,
        known: Callable[[Sequence[int]], int],
    ) -> PlannedPrompt:
        runtime, is_text = planner.primary, isinstance(asked.prompt, str)
        if not is_text:
            if not runtime.has_chat_template:
                raise NotPlanned("no chat template")
            if runtime.model.config.model_type == "gpt_oss":
                raise NotPlanned("vLLM has its own format for chats of GPT-OSS")
        segments = planner.segments(
            asked.prompt,
            documents=field.documents,
            tools=asked.tools,
            variables=asked.variables,
            as_it_stands=is_text,
        )
        if not is_text:
            # what vLLM makes of the messages, so that a plan never changes a prompt
            shown = runtime.render_chat(asked.prompt, tools=asked.tools, variables=asked.variables)  # type: ignore[arg-type]
            if "".join(segment.text for segment in segments) != shown:
                raise NotPlanned("chat template")
            _check_parts(runtime, asked, shown)
        return planner.plan(
            segments,
            method=method,
            question=field.question,
            documents=field.documents,
            moved=field.moved,
            known=known,
        )

    # -- counters ---------------------------------------------------------------------------------------------------

    def count(self, outcome: str, reason: str | None) -> None:
        self._outcomes[outcome] += 1
        if reason is not None:
            known = reason in self._plain or len(self._plain) < _MOST_REASONS
            self._plain[reason if known else "other"] += 1

    def text(self) -> str:
        outcomes = [(f'outcome="{name}"', n) for name, n in sorted(self._outcomes.items())]
        reasons = [(f'reason="{_escaped(reason)}"', n) for reason, n in sorted(self._plain.items())]
        return (
            self.metrics.to_prometheus()
            + exposition("outcomes_total", "counter", "Answers, by what became of their plan.", outcomes)
            + exposition("plain_total", "counter", "Answers by plain prefill, by reason.", reasons)
        )


def _check_parts(runtime: PlanningRuntime, asked: PlannablePrompt, shown: str) -> None:
    """Raise NotPlanned if contents in parts, or without any, may give another prompt in vLLM than their texts, with
    which it is ``shown``."""
    if not asked.parts:
        return
    if not _LOOPS_OVER_PARTS.search(runtime.tokenizer.get_chat_template(tools=list(asked.tools) or None)):
        return  # vLLM gives this template texts
    messages: list[Any] = list(asked.prompt)
    for number, parts in asked.parts.items():
        messages[number] = {**messages[number], "content": parts}
    if runtime.render_chat(messages, tools=asked.tools, variables=asked.variables) != shown:
        raise NotPlanned("parts of a content" if all(asked.parts.values()) else "no content")


def _without_paths(planned: PlannedPrompt, names: Mapping[str, str]) -> PlannedPrompt:
    reason, fallback = (each and renamed(each, names) for each in (planned.reason, planned.stats.fallback))
    return replace(planned, reason=reason, stats=replace(planned.stats, fallback=fallback))


def _method(planner: Planner, field: CacheClipField) -> Method:
    """The method of a request. Raises RequestError: it cannot be had here."""
    try:
        method = planner.make_method(field.method, field.ratio)  # type: ignore[arg-type]
    except ConfigurationError as error:
        raise RequestError(str(error), param="cacheclip.method") from error
    return method


def note(planning: Planning, planned: PlannedPrompt | None, tenant: str, result: Result) -> None:
    """Note what became of a prompt (:meth:`Planner.note`). Returns at once."""
    if planned is not None and planned.kept_about is not None and result.stats is not None:
        about = result.outcome, result.reason, result.stats.cached_prefix_tokens
        with suppress(RuntimeError):  # the server is closing
            planning._threads.submit(planning.planner(tenant).note, planned, *about)


def _escaped(text: Any) -> str:
    return str(text)[:200].replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
