"""The optional field ``cacheclip`` of a request: what OpenAI's API has no words for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cacheclip_rag import CallOptions, ConfigurationError
from cacheclip_rag.adapters import FINISH_MODES, MOVED_MODES
from cacheclip_rag.methods import check_method
from cacheclip_rag.plugins import check_choice, check_namespace, check_probability, check_ratio_and_limit, did_you_mean

from .errors import RequestError


def _checked(check: Callable[[Any], object]) -> AfterValidator:
    """``check`` for values other than None. Pydantic names the place of a ValueError only."""

    def validate(value: Any) -> Any:
        if value is not None:
            try:
                check(value)
            except ConfigurationError as error:
                raise ValueError(str(error)) from error
        return value

    return AfterValidator(validate)


class CacheClipField(BaseModel):
    """How chunks are reused in one answer. Every part is optional; the server's settings hold for the others."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)

    documents: list[str] = Field(default_factory=list)
    """Texts that are known to be in the prompt. Those that were not stored are stored after the answer."""
    method: Annotated[str | None, _checked(check_method)] = None
    """Name of a preset."""
    ratio: float | str | None = None
    """Share of chunk tokens to recompute, 0 to 1, or ``auto``."""
    max_ttft_s: float | None = None
    """Seconds after which the first token should be there, instead of a ratio."""
    min_confidence: Annotated[float | None, _checked(partial(check_probability, "min_confidence"))] = None
    """Prefill in full if the two likeliest first tokens differ less in probability, 0 to 1."""
    finish: Annotated[str | None, _checked(partial(check_choice, "finish", allowed=FINISH_MODES))] = None
    """``none``, ``idle``, ``verify`` or ``revise``; before vLLM ``none`` or ``idle``."""
    moved: Annotated[str | None, _checked(partial(check_choice, "moved", allowed=MOVED_MODES))] = None
    """``off``: no KV of earlier prompts that stood at another position, or behind other text."""
    question: str | None = None
    """Text that scores the chunks; default the text after the last chunk."""
    trace: bool | None = None
    """Whether the response says what the KV was made of (``Answer.trace``); not with ``hide_hits``."""
    background: bool | None = None
    """Whether the answer waits behind others; default for Open WebUI's titles, tags and follow-up questions."""
    tenant: Annotated[str | None, _checked(check_namespace)] = None
    """Tenant whose chunks are used; the request's API key must allow it."""

    def call_options(self) -> CallOptions:
        """What the field says of a call, but for tenant, confidence and background."""
        return CallOptions(
            method=self.method,
            recompute_ratio=self.ratio,
            max_ttft_s=self.max_ttft_s,
            question=self.question,
            documents=self.documents,
            finish=self.finish,
            moved=self.moved,
            trace=bool(self.trace),
        )

    def model_post_init(self, context: Any, /) -> None:
        unknown = sorted(self.model_extra or ())
        if unknown:
            known = list(type(self).model_fields)
            raise RequestError(
                f"unknown field cacheclip.{unknown[0]}.{did_you_mean(unknown[:1], known)} Known: {', '.join(known)}.",
                param=f"cacheclip.{unknown[0]}",
            )
        check_ratio_and_limit(self.ratio, self.max_ttft_s)
