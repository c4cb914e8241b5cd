"""Lets a request follow given tokens, while vLLM reports the log-probabilities that it would have chosen by: what
certification compares.

``logits_processors=[FORCING]`` of ``vllm.LLM``, for its first model runner. The second one has this built in
(``enable_trace_replay``).
"""

from __future__ import annotations

from typing import Any

import torch

FORCED = "cacheclip_forced"
"""Name in ``extra_args`` of sampling parameters: a list of token ids."""


def processor(base: type[Any]) -> type[Any]:
    """The logits processor, from vLLM's class of processors for single requests."""

    class ForcedTokens(base):  # type: ignore[misc]
        """Leaves one token to choose. Raw log-probabilities are computed before."""

        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Any:
            forced = (params.extra_args or {}).get(FORCED)
            return None if not forced else lambda output_ids, logits: _force(forced, len(output_ids), logits)

    return ForcedTokens


def _force(forced: list[int], number: int, logits: torch.Tensor) -> torch.Tensor:
    if number >= len(forced):
        return logits
    only = torch.full_like(logits, float("-inf"))
    only[forced[number]] = 0.0
    return only


def __getattr__(name: str) -> Any:
    if name == "ForcedTokens":
        from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

        found = globals()[name] = processor(AdapterLogitsProcessor)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
