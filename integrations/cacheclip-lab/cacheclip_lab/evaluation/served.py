"""Certifies what vLLM answers: its own prefill against its own reuse, with chunks that it computed itself.

The figures are those of :mod:`.certify`. vLLM is asked for the log-probabilities of the whole vocabulary at every
token, and follows full prefill's answer where answers are compared. What cannot be asked of it is not measured, and
the certificate says so: whether its prefill is plain transformers' prefill, that no token sees its future (a test of
this package compares its kernels), and confidence gates, because vLLM gives no logits before it answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cacheclip_vllm.encoding import encoding_options, encoding_primary, start_vllm
from cacheclip_vllm.offline import worker_of
from cacheclip_vllm.parameters import request_parameters
from cacheclip_vllm.planner import PlannedPrompt, Planner
from cacheclip_vllm.served import Served

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig
from cacheclip_rag.guards import Certificate, check_writable
from cacheclip_rag.measuring import compare, confidence, kl_divergence
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.models import concrete
from cacheclip_rag.plugins import progress_bar

from . import certify as common
from .exactness import DIRECT, EVERYTHING, SHIFTS, Check, equal_tokens
from .prompts import EvaluationPrompt

NOT_MEASURED = (
    "vLLM's full prefill against plain transformers",
    "that no token sees its future",
    "confidence gates (min_confidence)",
)
"""What a certificate of vLLM leaves out."""

_GREEDY_TOKENS = 64
_LIMIT = 1e-3
"""Largest difference of log-probabilities at the first token in float32; in half precision at least as much."""
_PROCESSOR = "cacheclip_vllm.forcing:ForcedTokens"
_FORCED = "cacheclip_forced"


@dataclass(frozen=True, slots=True)
class _ServedAnswer:
    """An answer of vLLM."""

    ids: list[int]
    rows: torch.Tensor
    """Log-probabilities at each token, ``(num_tokens, vocab_size)``; empty if they were not asked for."""
    planned: PlannedPrompt

    @property
    def effective_ratio(self) -> float:
        """Share of the reused chunks' tokens that were computed; 1.0 without any."""
        plan, fusion = self.planned.plan, self.planned.fusion
        tokens = sum(span.stop - span.start for span in plan.reused)
        if fusion is None or not tokens:
            return 1.0
        runs = [(max(a, span.start), min(b, span.stop)) for a, b in fusion.computed for span in plan.reused]
        return sum(max(0, stop - start) for start, stop in runs) / tokens


@dataclass(frozen=True)
class _VLLMSession:
    """A vLLM engine, what plans for it, and what stores chunks for it."""

    llm: Any
    planner: Planner
    engine: CacheClipEngine
    replays: bool
    """Whether vLLM follows given tokens by itself."""

    @cached_property
    def vocab_size(self) -> int:
        return int(self.llm.llm_engine.vllm_config.model_config.get_vocab_size())

    def ask(
        self,
        prompt: EvaluationPrompt,
        method: Method,
        tokens: int,
        *,
        text: str | None = None,
        along: Sequence[int] = (),
        ends: bool = True,
        rows: bool = True,
    ) -> _ServedAnswer:
        """Have vLLM answer greedily.

        Args:
            tokens: most tokens of the answer.
            text: the prompt's text, if it is another one.
            along: token ids that the answer follows instead.
            ends: False goes on after an end of turn.
            rows: whether log-probabilities are wanted.

        Raises:
            ConfigurationError: the method reuses chunks, and some chunk was not reused.
        """
        planned = self.planner.plan(prompt.text if text is None else text, method=method, question=prompt.question)
        if method.reuses_chunks and (planned.fusion is None or planned.plan.missing_texts):
            raise _not_reused(planned.reason or "some chunks were not found in the store")
        (output,) = self._generate([planned.token_ids], tokens, planned, along, ends=ends, rows=rows)
        outcome = (output.kv_transfer_params or {}).get("cacheclip", {})
        if planned.fusion is not None and outcome.get("outcome") not in ("fused", "cached"):
            raise _not_reused(str(outcome.get("reason") or "vLLM has no connector of this package"))
        return _ServedAnswer(list(output.outputs[0].token_ids), self._rows(output, rows), planned)

    def first_rows(self, *prompts: Sequence[int], forget: bool = True) -> torch.Tensor:
        """Log-probabilities of the first token after the first of the prompts, which vLLM prefills in one batch.

        Args:
            forget: whether vLLM forgets the prompts that it has seen before.
        """
        if forget:
            self.llm.reset_prefix_cache()
        return self._rows(self._generate(prompts, 1)[0], True)[0]

    def shifted_rows(self, ids: Sequence[int], by: int) -> torch.Tensor:
        """Log-probabilities of the first token after a prompt whose first token has position ``by``."""
        self.llm.collective_rpc("shift_positions", args=(by,))
        try:
            return self.first_rows(ids)
        finally:
            self.llm.collective_rpc("shift_positions", args=(0,))
            self.llm.reset_prefix_cache()

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        planned: PlannedPrompt | None = None,
        along: Sequence[int] = (),
        *,
        ends: bool = True,
        rows: bool = True,
    ) -> list[Any]:
        from vllm import SamplingParams

        extra: dict[str, Any] = {}
        if planned is not None and planned.fusion is not None:
            extra["kv_transfer_params"] = request_parameters(planned.fusion)
        given: dict[str, Any] = {"logprobs": -1, "flat_logprobs": True} if rows else {}
        if along and self.replays:
            given["trace_decode_token_ids"] = list(along)
        elif along:
            extra[_FORCED] = list(along)
        params = SamplingParams(
            temperature=0,
            max_tokens=len(along) or tokens,
            ignore_eos=not ends,
            detokenize=False,
            extra_args=extra or None,
            **given,
        )
        asked: list[dict[str, Any]] = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if planned is not None and planned.fusion is not None:  # neither exact KV nor that of another plan is found
            asked = [{**each, "cache_salt": planned.fusion.digest} for each in asked]
        found: list[Any] = self.llm.generate(asked, params, use_tqdm=False)
        return found

    def _rows(self, output: Any, wanted: bool) -> torch.Tensor:
        if not wanted:
            return torch.empty(0, self.vocab_size)
        flat = output.outputs[0].logprobs
        found = torch.full((len(flat.start_indices), self.vocab_size), float("-inf"))
        for row, start, stop in zip(found, flat.start_indices, flat.end_indices, strict=True):
            row[torch.tensor(flat.token_ids[start:stop])] = torch.tensor(flat.logprobs[start:stop])
        return found


def certify_vllm(
    config: EngineConfig,
    *,
    method: Method | None = None,
    quick: bool = False,
    vllm: Mapping[str, Any] | None = None,
) -> Certificate:
    """Like :func:`~cacheclip_lab.evaluation.certify.certify`, for answers that vLLM gives. vLLM starts for it, and
    ends with it; chunks are computed by vLLM and stored in a temporary folder.

    Args:
        vllm: further arguments of ``vllm.LLM``, such as ``tensor_parallel_size``.

    Raises:
        ConfigurationError: besides the reasons of ``certify``, vLLM alone cannot fuse prompts with this method; an
            option of vLLM is wrong.
        MissingExtraError: vLLM is not installed.
        ModelError: vLLM does not start.
        CertificateError: the certificate could not be saved later.
    """
    started = time.perf_counter()
    check_writable()
    config = replace(config, shadow_rate=0.0, require_certificate=False, min_confidence=None)
    given = replace(CacheClipEngine(replace(config, store=None)).make_method(method), min_confidence=0.0)
    _check_method(given)
    config = replace(config, auxiliary=config.auxiliary if given.needs_auxiliary else None)
    prompts = common.prompts_of(quick)
    with _started(config, vllm or {}) as session, progress_bar("certifying", len(prompts) + 1, "prompts") as advance:
        engine, methods = session.engine, common.at_ratios(given)
        outcomes: dict[float, list[common.PromptOutcome]] = {ratio: [] for ratio in methods}
        found_by_full: list[bool | None] = []
        engine.precompute(prompts[0].chunks, method=DIRECT)
        exactness = _check_exactness(session, prompts[0])
        advance(1)
        for number, prompt in enumerate(prompts, 2):
            engine.precompute(prompt.chunks, method=given)
            reference = session.ask(prompt, preset("full"), common.ANSWER_TOKENS)
            found_by_full.append(prompt.finds(_text(engine, reference.ids)))
            for ratio, at_ratio in methods.items():
                outcomes[ratio].append(_measure(session, prompt, at_ratio, reference))
            engine.release(set(prompt.chunks) - {text for later in prompts[number - 1 :] for text in later.chunks})
            advance(number)
        identity = session.planner.parts.certificates.identity(methods[max(methods)])
    return common.certificate_of(
        config,
        given,
        identity,
        exactness,
        found_by_full,
        outcomes,
        quick=quick,
        seconds=time.perf_counter() - started,
    )


@contextmanager
def _started(config: EngineConfig, options: Mapping[str, Any]) -> Iterator[_VLLMSession]:
    """vLLM with a store of its own."""
    config = concrete(config)
    device = worker_of(config.device)
    replays = device == "gpu"  # of vLLM's two model runners, the one for accelerators
    following = {"enable_trace_replay": True} if replays else {"logits_processors": [_PROCESSOR]}
    with TemporaryDirectory(prefix="cacheclip-") as folder:
        exchange, store = Path(folder, "exchange"), Path(folder, "store")
        exchange.mkdir()
        ours = encoding_options(exchange, store, namespace=config.namespace, device=device)
        # whole vocabularies are wanted, and forced tokens need the answer so far
        ours |= {"max_logprobs": -1, "async_scheduling": False, **following}
        llm = start_vllm(config.primary, config.dtype, ours, options)
        try:
            model = llm.llm_engine.vllm_config.model_config
            load = encoding_primary(
                llm, exchange, quantization=options.get("quantization"), max_tokens=model.max_model_len
            )
            config = replace(config, store=str(store))
            planner = Planner(config, served=Served.of(llm.llm_engine.vllm_config))
            engine = CacheClipEngine(config, load_primary=load)
            for observers in (planner.observers, engine.observers):
                observers.clear()  # they would warn that there is no certificate
            yield _VLLMSession(llm, planner, engine, replays)
            planner.close()
            engine.close()
        finally:
            llm.llm_engine.engine_core.shutdown()


def _check_method(method: Method) -> None:
    common.check_method(method)
    if not method.plans_ahead:
        raise ConfigurationError(
            f"method {method.name!r} chooses tokens by the primary's KV, so that an engine with the weights fuses for "
            "vLLM. Certify it without --backend vllm: that certificate holds for what such an engine hands to vLLM."
        )


def _not_reused(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"these models cannot be certified with vLLM, since a bundled prompt was not reused: {why}."
    )


def _measure(
    session: _VLLMSession, prompt: EvaluationPrompt, method: Method, reference: _ServedAnswer
) -> common.PromptOutcome:
    said = session.ask(prompt, method, common.ANSWER_TOKENS, along=reference.ids)
    fidelity = compare(reference.rows, said.rows)
    answer = reference.ids
    if prompt.needle is not None and fidelity.agreement < 1.0:
        answer = session.ask(prompt, method, common.ANSWER_TOKENS, rows=False).ids
    finds = prompt.finds(_text(session.engine, answer))
    ratio = said.effective_ratio
    return common.PromptOutcome(fidelity, ratio, ratio, finds, confidence(said.rows[0]))


def _text(engine: CacheClipEngine, ids: Sequence[int]) -> str:
    return engine.primary.decode_ids(ids)


def _check_exactness(session: _VLLMSession, prompt: EvaluationPrompt) -> dict[str, Any]:
    """Checks that reuse is exact in vLLM, as in :func:`~cacheclip_lab.evaluation.exactness.check_exactness`."""
    precise = session.planner.config.dtype == "float32"
    full = session.ask(prompt, preset("full"), _GREEDY_TOKENS, ends=False)
    floor = _noise_floor(session, full.planned.token_ids)
    limit = _LIMIT if precise else max(_LIMIT, 2 * floor["logits"])
    everything = session.ask(prompt, EVERYTHING, _GREEDY_TOKENS, along=full.ids, ends=False)
    single = f"{prompt.chunks[0]}\n\nQuestion: {prompt.question}"
    reused, plain = (session.ask(prompt, method, 1, text=single) for method in (DIRECT, preset("full")))
    equal = float((everything.rows.argmax(-1) == full.rows.argmax(-1)).float().mean())
    says = "largest difference of log-probabilities at the first token"
    checks = {
        "ratio_1": _gap(everything.rows[0], full.rows[0], limit, f"{says}, ratio 1.0 against vLLM's full prefill"),
        "first_chunk": _gap(
            reused.rows[0],
            plain.rows[0],
            limit,
            f"{says}, one chunk after the shared prefix, nothing recomputed, against vLLM's full prefill",
        ),
        "greedy": equal_tokens(equal, required=precise),
    }
    return {
        "passed": all(check.passed for check in checks.values()),
        "noise_floor": floor,
        "prompt_tokens": len(full.planned.token_ids),
        "checks": {name: asdict(check) for name, check in checks.items()},
        "not_measured": list(NOT_MEASURED),
    }


def _gap(left: torch.Tensor, right: torch.Tensor, limit: float, says: str) -> Check:
    figure = float((left - right).abs().max())
    return Check(figure, limit, figure <= limit, says)


def _noise_floor(session: _VLLMSession, ids: Sequence[int]) -> dict[str, float]:
    """Differences between vLLM's own correct prefills of one prompt: at once, again from its prefix cache, after a
    third of it, beside another prompt, and with all positions shifted. Some kernels round alike but for the last.

    Returns:
        ``logits``: largest difference of log-probabilities; ``kl``: largest KL from the first, nats.
    """
    found = [session.first_rows(ids), session.first_rows(ids, forget=False)]
    session.first_rows(ids[: len(ids) // 3])
    found += [session.first_rows(ids, forget=False), session.first_rows(ids, ids[len(ids) // 2 :])]
    room = max(0, session.planner.primary.reuse_tokens - len(ids))
    found += [session.shifted_rows(ids, min(shift, room)) for shift in SHIFTS if shift]
    gaps = [float((left - right).abs().max()) for n, left in enumerate(found) for right in found[:n]]
    return {"logits": max(gaps), "kl": max(float(kl_divergence(found[0], other)) for other in found[1:])}
