"""Token counts of an answer under the names that frameworks and OpenTelemetry use."""

from __future__ import annotations

from typing import Any

from ..fusion.answer import Answer


def token_usage(answer: Answer) -> dict[str, Any]:
    """Token counts under OpenAI's names. ``prompt_tokens_details["cached_tokens"]`` counts tokens whose KV was
    reused."""
    prompt, completion = answer.stats.prompt_tokens, len(answer.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answer.stats.reused_tokens},
    }


def telemetry(answer: Answer) -> dict[str, int]:
    """Token counts under the names of OpenTelemetry's semantic conventions for generative AI."""
    return {
        "gen_ai.usage.input_tokens": answer.stats.prompt_tokens,
        "gen_ai.usage.output_tokens": len(answer.token_ids),
        "gen_ai.usage.cache_read.input_tokens": answer.stats.reused_tokens,
    }
