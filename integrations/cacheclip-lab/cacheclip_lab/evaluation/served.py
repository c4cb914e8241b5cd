"""Certifies what vLLM answers: its own prefill against its own reuse, with chunks that it computed itself.

The figures are those of :mod:`.certify`. vLLM is asked for the log-probabilities of the whole vocabulary at every
token, and follows full prefill's answer where answers are compared. What cannot be asked of it is not measured, and
the certificate says so: whether its prefill is plain transformers' prefill, that no token sees its future (a test of
this package compares its kernels), and confidence gates, because vLLM gives no logits before it answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from cacheclip_vllm import MeasuredAnswer, MeasuredVLLM, measured_vllm

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig
from cacheclip_rag.measuring import confidence, kl_divergence
from cacheclip_rag.methods import Method, preset
from cacheclip_rag.plugins import progress_bar

from ..certificates.identity import identity_of
from . import certify as common
from .certificate import Certificate, check_writable
from .exactness import DIRECT, EVERYTHING, SHIFTS, Check, equal_tokens
from .fidelity import compare
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
    config = replace(config, shadow_rate=0.0, require_certificate=False, min_confidence=0.0)
    given = replace(CacheClipEngine(replace(config, store=None)).make_method(method), min_confidence=0.0)
    common.check_method(given)
    config = replace(config, auxiliary=config.auxiliary if given.needs_auxiliary else None)
    prompts = common.prompts_of(quick)
    with (
        measured_vllm(config, vllm or {}) as session,
        progress_bar("certifying", len(prompts) + 1, "prompts") as advance,
    ):
        engine, methods = session.engine, common.at_ratios(given)
        outcomes: dict[float, list[common.PromptOutcome]] = {ratio: [] for ratio in methods}
        found_by_full: list[bool | None] = []
        engine.precompute(prompts[0].chunks, method=DIRECT)
        exactness = _check_exactness(session, prompts[0])
        advance(1)
        for number, prompt in enumerate(prompts, 2):
            engine.precompute(prompt.chunks, method=given)
            reference = _ask(session, prompt, preset("full"), common.ANSWER_TOKENS)
            found_by_full.append(prompt.finds(_text(engine, reference.ids)))
            for ratio, at_ratio in methods.items():
                outcomes[ratio].append(_measure(session, prompt, at_ratio, reference))
            engine.release(set(prompt.chunks) - {text for later in prompts[number - 1 :] for text in later.chunks})
            advance(number)
        identity = identity_of(session.planner, methods[max(methods)])
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


def _ask(
    session: MeasuredVLLM, prompt: EvaluationPrompt, method: Method, tokens: int, **options: Any
) -> MeasuredAnswer:
    """An answer to a bundled prompt; see :meth:`MeasuredVLLM.ask`. Raises ConfigurationError: the method reuses chunks,
    and some chunk was not reused."""
    answer = session.ask(prompt.text, method, tokens, question=prompt.question, **options)
    if answer.not_reused is not None:
        raise ConfigurationError(
            f"these models cannot be certified with vLLM, since a bundled prompt was not reused: {answer.not_reused}."
        )
    return answer


def _measure(
    session: MeasuredVLLM, prompt: EvaluationPrompt, method: Method, reference: MeasuredAnswer
) -> common.PromptOutcome:
    said = _ask(session, prompt, method, common.ANSWER_TOKENS, along=reference.ids)
    fidelity = compare(reference.rows, said.rows)
    answer = reference.ids
    if prompt.needle is not None and fidelity.agreement < 1.0:
        answer = _ask(session, prompt, method, common.ANSWER_TOKENS, rows=False).ids
    finds = prompt.finds(_text(session.engine, answer))
    ratio = said.planned.effective_ratio
    return common.PromptOutcome(fidelity, ratio, ratio, finds, confidence(said.rows[0]))


def _text(engine: CacheClipEngine, ids: Sequence[int]) -> str:
    return engine.primary.decode_ids(ids)


def _check_exactness(session: MeasuredVLLM, prompt: EvaluationPrompt) -> dict[str, Any]:
    """Checks that reuse is exact in vLLM, as in :func:`~cacheclip_lab.evaluation.exactness.check_exactness`."""
    precise = session.planner.config.dtype == "float32"
    full = _ask(session, prompt, preset("full"), _GREEDY_TOKENS, ends=False)
    floor = _noise_floor(session, full.planned.token_ids)
    limit = _LIMIT if precise else max(_LIMIT, 2 * floor["logits"])
    everything = _ask(session, prompt, EVERYTHING, _GREEDY_TOKENS, along=full.ids, ends=False)
    single = EvaluationPrompt(prompt.chunks[:1], prompt.question, prompt.needle)
    reused, plain = (_ask(session, single, method, 1) for method in (DIRECT, preset("full")))
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


def _noise_floor(session: MeasuredVLLM, ids: Sequence[int]) -> dict[str, float]:
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
