"""What clients send that changes no answer: server and adapters take it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"),
        *("prompt_cache_retention", "prompt_cache_options", "keep_alive", "priority", "timeout", "extra_headers"),
        *("session_id", "chat_id", "request_id", "id", "message_id", "conversation_id", "thread_id", "trace_id"),
        *("provider", "route", "models", "usage", "caching", "num_retries", "drop_params", "ttl"),  # of what routes
        *("cache", "tags", "fallbacks", "max_retries", "maxRetries"),
        *("litellm_metadata", "litellm_session_id", "litellm_trace_id", "litellm_call_id", "litellm_logging_obj"),
        # Open WebUI's, which has followed them itself
        *("features", "variables", "model_item", "background_tasks", "tool_ids", "tool_servers", "filter_ids"),
        # Ollama's: how the model is loaded. The context is the model's own, and a longer prompt is an error
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "numa"),
        # llama.cpp's and others': what is kept and shown, and numbers of samplers that are off
        *("cache_prompt", "id_slot", "truncation_length", "n_keep", "num_keep", "min_keep", "n_ctx"),
        *("timings_per_token", "return_progress", "dynatemp_exponent", "xtc_threshold", "repeat_last_n"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "penalty_last_n"),
        *("mirostat_tau", "mirostat_eta"),
    }
)
"""Fields that do not change an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys("n best_of length_penalty typical_p repeat_penalty tfs tfs_z typical typ_p".split(), (1,)),
    **dict.fromkeys(
        (
            "logprobs echo ignore_eos use_beam_search include_stop_str_in_output continue_final_message "
            "return_token_ids return_tokens_as_token_ids post_sampling_probs raw safe_prompt background "
            "ban_eos_token"
        ).split(),
        (False,),
    ),
    **dict.fromkeys(
        (
            "top_logprobs min_p min_tokens mirostat mirostat_mode dry_multiplier xtc_probability top_a "
            "dynatemp_range n_probs"
        ).split(),
        (0,),
    ),
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    **dict.fromkeys("include_reasoning skip_special_tokens add_generation_prompt add_bos_token".split(), (True,)),
    "spaces_between_special_tokens": (True, False),
    **dict.fromkeys("n_predict num_predict t_max_predict_ms".split(), (-1,)),
    "reasoning_format": ("auto", "deepseek", "parsed"),
}
"""Values with which a field that is not followed changes nothing."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""What clients send for nothing, in every field that may be left out."""


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field or option that is not followed changes no answer with this value."""
    return name in IGNORED or says_nothing(value) or is_neutral(value, NEUTRAL.get(name, ()))


def says_nothing(value: Any) -> bool:
    """Whether a value is null, empty, or an object of nulls."""
    return is_neutral(value, _NOTHING) or (isinstance(value, Mapping) and all(each is None for each in value.values()))


def is_neutral(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value changes nothing. A number is no flag: 0 is not false."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
