"""vLLM offline: answers from stored chunks by a ``vllm.LLM`` in this process.

>>> llm = vllm.LLM("my-model", dtype="float32", **engine_options(store="my-store"))
>>> fused = FusedLLM(llm, Planner(primary="my-model", store="my-store", method="cacheclip"))
>>> fused.generate([prompt], SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from os import PathLike
from pathlib import Path
from typing import Any

from cacheclip_rag import CertificateError, ConfigurationError, PromptTooLongError
from cacheclip_rag.guards import Metrics
from cacheclip_rag.methods import Method
from cacheclip_rag.planning import Documents, PlannedPrompt, Prompt
from cacheclip_rag.plugins import check_choice, is_url

from .internals import PROBE_TOKENS, check_probe, check_vllm, is_tried, probe
from .parameters import PARAMETER, UNREADABLE, carried_with, request_parameters
from .planner import Planner
from .served import Served
from .shadow import Shadow

logger = logging.getLogger(__name__)

_WORKERS = {"cpu": "CPUWorker", "gpu": "GPUWorker"}


def worker_of(device: str) -> str:
    """The kind of vLLM's worker, ``cpu`` or ``gpu``, for a setting ``device``."""
    return "cpu" if device.startswith("cpu") else "gpu"


def engine_options(
    store: str | PathLike[str] | None = None,
    *,
    namespace: str | Sequence[str] | None = "default",
    device: str = "cpu",
    sealed: bool = False,
    prompt_bytes: int = 0,
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` (and ``AsyncEngineArgs``) that make it take fused prompts.

    Args:
        store: folder or URL of the chunk-cache store.
        namespace: tenant whose chunks requests may use, or several. Plans of several tenants should be sealed.
            None: the environment names them (:data:`~cacheclip_vllm.parameters.NAMESPACES_VARIABLE`).
        device: ``cpu`` or ``gpu``.
        sealed: whether plans need a seal (:mod:`.requests`), as those of ``cacheclip serve`` have.
        prompt_bytes: memory of the workers for KV of prompts, which later ones move; 0: none is moved.
    """
    check_choice("device", device, tuple(_WORKERS))
    extra: dict[str, Any] = {}
    if namespace is not None:
        extra["namespaces"] = [namespace] if isinstance(namespace, str) else sorted(namespace)
    if sealed:
        extra["sealed"] = True
    if prompt_bytes:
        extra["prompt_bytes"] = prompt_bytes
    if store is not None:
        extra["store"] = str(store if is_url(store) else Path(store).absolute())
    return {
        "worker_cls": f"cacheclip_vllm.worker.{_WORKERS[device]}",
        "kv_transfer_config": {
            "kv_connector": "CacheClipConnector",
            "kv_connector_module_path": "cacheclip_vllm.connector",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    }


class FusedLLM:
    """Plans prompts, and has vLLM answer them.

    A prompt that cannot be fused is answered by vLLM's ordinary prefill; ``plain`` counts the reasons. What became of a
    fused one is in its output: ``output.kv_transfer_params["cacheclip"]`` has ``outcome`` (``fused``; ``cached``: all
    was in vLLM's own prefix cache; ``plain``) and ``reason``.
    """

    def __init__(self, llm: Any, planner: Planner) -> None:
        """
        Args:
            llm: a ``vllm.LLM`` made with :func:`engine_options`.

        Raises:
            ConfigurationError: its version was never tried, and lacks something or answers otherwise.
        """
        self.llm, self.planner = llm, planner
        planner.serve(Served.of(llm.llm_engine.vllm_config))
        extra = llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        if extra.get("prompt_bytes"):
            planner.keep_prompts()
        if not is_tried():
            check_vllm()
            self._check_version()
        self.metrics = Metrics(planner.parts.tier_stats)
        """Counters of shadow checks (``shadow_rate`` of the planner's settings) and of the store."""
        self._shadow = Shadow(planner.config.shadow_rate, self.metrics)
        self.plain: Counter[str] = Counter()
        """Prompts answered by plain prefill, by reason."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Any = None,
        *,
        method: str | Method | None = None,
        recompute_ratio: float | None = None,
        question: str | None = None,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        moved: str | None = None,
        **options: Any,
    ) -> list[Any]:
        """Answer prompts; returns vLLM's ``RequestOutput`` objects.

        Args:
            prompts: strings, or lists of chat messages.
            sampling_params: vLLM's ``SamplingParams``, one for all prompts or one each; default vLLM's.
            options: passed to ``LLM.generate``.

        Other arguments are those of :meth:`CacheClipEngine.generate`.

        Raises:
            ConfigurationError: a setting is out of range. PromptTooLongError: a prompt does not fit the model.
            CertificateError: as for :meth:`CacheClipEngine.generate`.
        """
        sampling = self._sampling(sampling_params, len(prompts))
        asked = {"method": method, "recompute_ratio": recompute_ratio, "question": question, "tools": tools}
        asked["moved"] = moved
        inputs: list[dict[str, Any]] = []
        chosen: list[Any] = []
        plans: list[PlannedPrompt | None] = []
        for prompt, params in zip(prompts, sampling, strict=True):
            ids, planned = self._prepare(prompt, documents, asked)
            plans.append(planned)
            inputs.append({"prompt_token_ids": list(ids)})
            carried = None if planned is None else carried_with(planned, self.planner.config.namespace)
            chosen.append(_with(params, carried) if carried else params)
        found: list[Any] = self.llm.generate(inputs, chosen, **options) if inputs else []
        for output, planned in zip(found, plans, strict=True):
            outcome = (output.kv_transfer_params or {}).get("cacheclip", {})
            if outcome.get("outcome") == "plain":
                self._count(outcome["reason"])
            if planned is not None:
                self.planner.note(planned, outcome.get("outcome"), outcome.get("reason"), output.num_cached_tokens or 0)
                if planned.fusion is not None and outcome.get("reason") == UNREADABLE:
                    self.planner.drop_unreadable(planned.fusion)
        self._compare(sampling, found, str(getattr(method, "name", method) or self.planner.config.method))
        return found

    def _check_version(self) -> None:
        """Raise ConfigurationError unless a recomputed prompt has the answer of plain prefill."""
        from vllm import SamplingParams

        plan = probe(self.planner.primary, self.planner.config.namespace)
        params = SamplingParams(temperature=0, max_tokens=PROBE_TOKENS, ignore_eos=True)
        asked = [{"prompt_token_ids": list(plan.token_ids)}]
        fused, plain = (
            self.llm.generate(asked, each, use_tqdm=False)[0]
            for each in (_with(params, request_parameters(plan)), params)
        )
        told = (fused.kv_transfer_params or {}).get(PARAMETER, {})
        check_probe(told.get("outcome"), *(list(each.outputs[0].token_ids) for each in (fused, plain)))

    def _compare(self, params: Sequence[Any], found: Sequence[Any], method: str) -> None:
        """Ask a share of the fused prompts again, for plain prefill, and compare."""
        chosen = []
        for number, (given, output) in enumerate(zip(params, found, strict=True)):
            outcome = (output.kv_transfer_params or {}).get("cacheclip", {}).get("outcome")
            if self._shadow.chooses(given, outcome):
                chosen.append(number)
        if not chosen:
            return
        answers = [list(found[number].outputs[0].token_ids) for number in chosen]
        again = [self._shadow.params(params[n], len(ids)) for n, ids in zip(chosen, answers, strict=True)]
        try:
            prompts = [{"prompt_token_ids": list(found[number].prompt_token_ids)} for number in chosen]
            plain = self.llm.generate(prompts, again, use_tqdm=False)
        except Exception as error:
            for _ in chosen:
                self._shadow.skip(error)
            return
        for ids, output in zip(answers, plain, strict=True):
            self._shadow.record(ids, output.outputs[0].token_ids, method=method)

    def _sampling(self, given: Any, count: int) -> list[Any]:
        if given is None:
            given = self.llm.get_default_sampling_params()
        if not isinstance(given, Sequence):
            return [given] * count
        if len(given) != count:
            raise ConfigurationError(f"there are {count} prompts and {len(given)} sampling_params. Give one each.")
        return list(given)

    def _prepare(
        self, prompt: Prompt, documents: Documents, asked: dict[str, Any]
    ) -> tuple[Sequence[int], PlannedPrompt | None]:
        """Token ids of a prompt and what is planned for it; None: it cannot be planned."""
        try:
            planned = self.planner.plan(prompt, documents=documents, **asked)
        except (ConfigurationError, PromptTooLongError, CertificateError):
            raise
        except Exception as error:  # vLLM answers what we cannot plan
            self._count(f"planning failed ({type(error).__name__}: {error})")
            return self.planner.token_ids(prompt, tools=asked["tools"]), None
        if planned.reason is not None:
            self._count(planned.reason)
        return planned.token_ids, planned

    def _count(self, reason: str) -> None:
        level = logging.DEBUG if reason in self.plain else logging.WARNING
        self.plain[reason] += 1
        logger.log(level, "answering by plain prefill: %s", reason)


def _with(params: Any, carried: Mapping[str, Any]) -> Any:
    """Sampling parameters that carry ``kv_transfer_params``."""
    params = copy(params)
    extra = dict(params.extra_args or {})
    extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **carried}
    params.extra_args = extra
    return params
