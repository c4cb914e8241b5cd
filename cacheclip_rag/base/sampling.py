"""Settings of one call. This module does not import torch, so that front ends can check settings quickly."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from .checks import by_real_names, check_number, check_whole_number, is_whole_number, refuse_unknown
from .errors import ConfigurationError

FINISH_MODES = ("none", "idle", "verify", "revise")
"""What becomes of an approximate answer: left as it is (with ``idle``, its exact KV is completed afterwards), verified
by full prefill, or corrected by it."""
MOVED_MODES = ("on", "off")
"""Whether KV of earlier prompts may be moved to other positions."""
LEAST_PENALTY = 0.01
"""A penalty for repetition far below would overflow float32 logits."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings.

    Raises:
        ConfigurationError: a value out of range.
    """

    max_tokens: int = 256
    """Most new tokens; fewer if the model's context ends first."""
    temperature: float = 0.0
    """0 is greedy; otherwise the logits are divided by this number."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 0: the likeliest token."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 (also -1): from all."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that stand in prompt or answer become less likely, as in transformers. Such an answer is not
    verified by ``finish``."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it stands in the answer, -2 to 2, as OpenAI defines it; nor is such
    an answer verified."""
    presence_penalty: float = 0.0
    """The same, once for a token that stands in the answer."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    seed: int | None = None
    """Makes sampling repeatable as long as the same KV is reused. What earlier prompts left in the prefix cache, and
    answers that are computed at the same time, change the rounding: a token may differ where two are almost equally
    likely. ``prefix_cache_bytes=0``, a store that does not change and one question at a time give the same tokens."""
    json_schema: Any = None
    """The answer is JSON that follows this JSON schema, a dict or JSON text: before each token, all tokens that cannot
    come next are ruled out. Objects have only the properties that the schema names, unless it says
    ``additionalProperties``. Needs the extra ``structured``; not with ``finish``. ``max_tokens`` may cut the answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        check_whole_number("max_tokens", self.max_tokens, least=1)
        if not isinstance(self.temperature, int | float) or not 0.0 <= self.temperature <= 100.0:
            raise ConfigurationError(f"temperature must be between 0 (greedy) and 100, got {self.temperature!r}.")
        if not isinstance(self.top_p, int | float) or not 0.0 <= self.top_p <= 1.0:
            raise ConfigurationError(f"top_p must be between 0 (the likeliest token) and 1, got {self.top_p!r}.")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        check_whole_number("top_k", self.top_k)
        penalty = self.repetition_penalty
        if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not LEAST_PENALTY <= penalty <= 10:
            raise ConfigurationError(
                f"repetition_penalty must be between {LEAST_PENALTY} and 10 (1: none), got {penalty!r}."
            )
        for name in ("frequency_penalty", "presence_penalty"):
            check_number(name, getattr(self, name), "a number from -2 to 2 (0: none)", least=-2.0, most=2.0)
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigurationError(f"stop must be a tuple of non-empty strings, got {self.stop!r}.")
        if self.seed is not None and (not is_whole_number(self.seed) or not -(2**63) <= self.seed < 2**63):
            raise ConfigurationError(f"seed must be a whole number of 64 bits or None, got {self.seed!r}.")

    def with_options(self, options: Mapping[str, Any]) -> SamplingParams:
        """These settings overridden by ``options``, by name. ``stop`` may be a string or a list; empty strings in it
        stop nothing.

        Raises:
            ConfigurationError: an unknown option, or a value out of range.
        """
        known = [each.name for each in fields(self)]
        named = by_real_names(options, known)
        refuse_unknown("call option", named, known)
        if "stop" in named:
            named["stop"] = _stops(named["stop"])
        return replace(self, **named)


class SamplingKeywords(TypedDict, total=False):
    """Fields of :class:`SamplingParams` as keywords of a call, under the names of frameworks too. None is as if it was
    not given."""

    max_tokens: int | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stop: str | Collection[str] | None
    stop_sequences: str | Collection[str] | None
    seed: int | None
    json_schema: Any


def _stops(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop or (), str | list | tuple | set | frozenset):
        raise ConfigurationError(f"stop must be a string or a list of strings, got {stop!r}.")
    return tuple(each for each in ([stop] if isinstance(stop, str) else stop or ()) if each not in ("", None))


def _schema_text(schema: Any) -> str | None:
    """A JSON schema as JSON text, so that settings can be compared and hashed."""
    if schema is None:
        return None
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(parsed, Mapping):
            return json.dumps(parsed, ensure_ascii=False)
    except (TypeError, ValueError):
        pass
    raise ConfigurationError(f"json_schema must be a JSON schema, as a dict or as JSON text, got {str(schema)[:80]!r}.")


GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow float32 logits; they choose the likeliest token anyway."""
NO_PENALTIES = (1.0, 0.0, 0.0)
"""For repetition, frequency and presence."""


def is_greedy(params: SamplingParams) -> bool:
    """Whether these settings always choose the model's likeliest token."""
    penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    return penalties == NO_PENALTIES and (params.temperature < GREEDY_BELOW or params.top_p == 0)
