"""What the tests of the engine share: short answers, a prompt, what must add up."""

from typing import Any

import torch

from cacheclip_rag import Answer, CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import PHASES, Prefilled
from cacheclip_rag.methods import Method

SHORT = SamplingParams(max_tokens=12)


def rag(chunks: list[str], question: str = "What is the magic number?") -> str:
    return "\n\n".join(chunks) + f"\n\nQuestion: {question}"


def logits(engine: CacheClipEngine, prompt: Any, method: Method) -> Prefilled:
    """The engine's own prefill, up to the logits that its answer is sampled from."""
    with torch.inference_mode():
        return engine.prefill(prompt, SHORT, method=method)


def check_sums(answer: Answer) -> None:
    stats = answer.stats
    assert stats.prefix_tokens + stats.fresh_tokens + stats.chunk_tokens == stats.prompt_tokens
    assert stats.reused_tokens == stats.prefix_tokens + stats.chunk_tokens - stats.recomputed_tokens
    assert 0 <= stats.recomputed_tokens <= stats.chunk_tokens
    assert stats.generated_tokens == len(answer.token_ids)
    assert set(stats.phases_s) == set(PHASES) and all(s >= 0 for s in stats.phases_s.values())
    assert sum(stats.phases_s.values()) <= stats.ttft_s + 1e-3
    assert stats.to_dict()["effective_ratio"] == stats.effective_ratio
