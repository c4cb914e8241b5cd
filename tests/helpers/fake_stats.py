"""Statistics of an answer that nobody gave."""

from typing import Any

from cacheclip_rag import FusionStats


def stats(method: str, **given: Any) -> FusionStats:
    """One of 1000 tokens, of which 100 are fresh, 50 are a prefix and 150 of the chunks' are recomputed."""
    counts = {"prompt_tokens": 1000, "prefix_tokens": 50, "fresh_tokens": 100, "chunk_tokens": 850, "exact_tokens": 7}
    rest: dict[str, Any] = {
        "fallback": None,
        "recomputed_tokens": 150,
        "nominal_ratio": 0.2,
        "hits": 3,
        "misses": 2,
        "phases_s": {},
    }
    return FusionStats(**{"method": method, **counts, **rest, "ttft_s": 0.25, **given})
