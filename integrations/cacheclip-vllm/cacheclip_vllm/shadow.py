"""Self-check of vLLM's answers: a share of the greedy ones is asked again without a plan, and compared.

vLLM does not give the logits of answers that nobody asked them for, so that only tokens are compared: the second
request is plain prefill, answers greedily, and its first tokens are counted up to the first one that differs. An
answer that is sampled is not compared. This module does not import vLLM, and asks nobody: offline,
:class:`~cacheclip_vllm.offline.FusedLLM` asks after its answers; ``cacheclip serve --backend vllm`` asks
when the client has its answer (``vllm/shadow_checks.py``).

>>> shadow = Shadow(rate=0.01, metrics=Metrics())
>>> if shadow.chooses(params, outcome):                     # of an answered request
...     again = shadow.params(params, len(answer_ids))      # of a plain request with the same token ids
...     shadow.record(answer_ids, plain_ids, method="cacheclip")
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from cacheclip_rag.guards import Metrics

logger = logging.getLogger(__name__)

SHADOW_TOKENS = 16
"""Most tokens of an answer that are compared."""

_OF_PARAMS = ("structured_outputs", "prompt_logprobs")
_OF_BODIES = (*_OF_PARAMS, "response_format", "tools", "logprobs")
"""What asks for more than a free text: in ``SamplingParams``, and in requests to a server."""
_NEUTRAL: tuple[Any, ...] = (None, False, [], {"type": "text"})
"""Values of a request's field that ask for nothing."""


class Shadow:
    """Chooses answers at random and counts how far they agree with plain prefill. Safe to share between threads."""

    def __init__(self, rate: float, metrics: Metrics) -> None:
        """``rate``: share of the fused greedy answers, 0 to 1. ``metrics`` gets ``shadow_greedy_checks_total``,
        ``shadow_agreement_sum`` and ``shadow_skipped_total``, with ``shadow_other_first_token_total`` in place of a
        KL."""
        self.rate, self.metrics = rate, metrics
        self._random = random.Random()
        self._lock = threading.Lock()

    def chooses(self, params: Any, outcome: str | None) -> bool:
        """Whether an answer is to be compared, by vLLM's ``SamplingParams`` or the fields of a request to its server,
        and by what became of the request (``fused``, ``cached`` or ``plain``)."""
        if not self.rate or outcome not in ("fused", "cached") or not _is_comparable(params):
            return False
        with self._lock:
            return self._random.random() < self.rate

    def params(self, params: Any, num_tokens: int) -> Any:
        """Sampling parameters of the plain request: those of the answer without a plan, and few tokens."""
        plain = copy(params)
        plain.max_tokens = max(1, min(num_tokens, SHADOW_TOKENS))
        plain.logprobs = None
        extra = dict(params.extra_args or {})
        extra.pop("kv_transfer_params", None)
        plain.extra_args = extra or None
        return plain

    def record(self, answer_ids: Sequence[int], plain_ids: Sequence[int], *, method: str) -> float:
        """Count one comparison; returns the share of compared tokens before the first that differs."""
        count = max(1, min(len(answer_ids), SHADOW_TOKENS))
        pairs = zip(answer_ids[:count], plain_ids, strict=False)
        equal = next((n for n, (given, plain) in enumerate(pairs) if given != plain), min(count, len(plain_ids)))
        agreement = equal / count
        self.metrics.record_shadow(None, agreement, first_agrees=equal > 0)
        logger.log(
            logging.INFO if equal else logging.WARNING,
            "shadow: %d of %d tokens agree with plain prefill up to the first that differs (%s)",
            equal,
            count,
            method,
        )
        return agreement

    def skip(self, error: object) -> None:
        """Count a comparison that failed; the answer itself is not affected."""
        self.metrics.record_shadow_skipped()
        logger.warning("shadow: comparison with plain prefill failed: %s", error)


def _is_comparable(params: Any) -> bool:
    """Whether the answer is greedy, one, and free: full prefill's choices within a grammar say little."""
    is_body = isinstance(params, Mapping)
    names, neutral = (_OF_BODIES, _NEUTRAL) if is_body else (_OF_PARAMS, (None,))

    def given(name: str) -> Any:
        return params.get(name) if is_body else getattr(params, name, None)

    return given("temperature") == 0 and given("n") in (None, 1) and all(given(name) in neutral for name in names)
