"""What a caller may say about one answer. Engine, adapters, server and command line pass it whole.

This module does not import torch, so that front ends can check options quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from ..base.checks import (
    AUTO_RATIO,
    by_real_names,
    check_choice,
    check_ratio_and_limit,
    check_whole_number,
    refuse_unknown,
)
from ..base.errors import ConfigurationError
from ..base.sampling import FINISH_MODES, MOVED_MODES, SamplingKeywords, SamplingParams
from ..prompt.messages import check_template_kwargs
from ..prompt.tools import check_tools

if TYPE_CHECKING:
    from ..config import EngineConfig
    from ..methods.base import Method
    from ..prompt.messages import Documents, Prompt
    from ..prompt.segments import Segment


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call. Where a field is None, the engine's setting is used.

    Raises:
        ConfigurationError: a value out of range.
    """

    params: SamplingParams = SamplingParams()
    """Sampling settings; default greedy, 256 tokens."""
    method: str | Method | None = None
    """Preset's name or instance."""
    recompute_ratio: float | str | None = None
    """``auto`` chooses it by predicted time (:attr:`EngineConfig.recompute_ratio`)."""
    max_ttft_s: float | None = None
    """Seconds after which the first token should be there, instead of a ratio. Methods that reuse no stored chunks take
    no notice of it."""
    question: str | None = None
    """Text that scores the chunks; None: the text after the last chunk."""
    documents: Documents = ()
    """Chunk texts known to be in the prompt. They become chunks even if they are not stored, unless parts of stored
    ones cover them. A mapping also names each text's sources. Ignored if the prompt is a list of segments."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Definitions of tools that the model may call, in OpenAI's function format. The chat template tells the model of
    them; calls are in ``tool_calls`` of events and answer, and no longer in their text. Text that may be a call, or be
    withdrawn, is held back. Segments are not changed."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as ``{"enable_thinking": False}``. Templates ignore those they do not know.
    Segments are not changed."""
    finish: str | None = None
    """``none``, ``idle``, ``verify`` or ``revise``, see :attr:`EngineConfig.finish`. With ``revise``, an event may
    withdraw text (:attr:`~cacheclip_rag.fusion.answer.Event.revised_from`)."""
    moved: str | None = None
    """``on`` or ``off``, see :attr:`EngineConfig.moved`."""
    logprobs: int | None = None
    """Record how likely each new token was, and this many of the likeliest at its place, 0 to 20; None: nothing. Not
    with ``finish="revise"``, which replaces tokens."""
    trace: bool = False
    """Whether the answer's ``trace`` records which tokens were computed again."""

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise ConfigurationError(f"params must be SamplingParams, got {type(self.params).__name__}.")
        if self.question is not None and not isinstance(self.question, str):
            raise ConfigurationError(f"the question must be a string, got {type(self.question).__name__}.")
        if self.finish is not None:
            check_choice("finish", self.finish, FINISH_MODES)
        if self.moved is not None:
            check_choice("moved", self.moved, MOVED_MODES)
        check_ratio_and_limit(self.recompute_ratio, self.max_ttft_s)
        if self.logprobs is not None:
            check_whole_number("logprobs", self.logprobs, most=20)
        if self.tools != ():
            object.__setattr__(self, "tools", tuple(check_tools(self.tools)))
        if self.chat_template_kwargs or not isinstance(self.chat_template_kwargs, Mapping):
            object.__setattr__(self, "chat_template_kwargs", check_template_kwargs(self.chat_template_kwargs))

    @property
    def finishes(self) -> bool:
        """Whether the answer is verified by full prefill."""
        return self.finish in ("verify", "revise")

    @property
    def auto_ratio(self) -> bool:
        """Whether the recompute ratio is chosen by predicted time (:mod:`cacheclip_rag.answering.ratios`)."""
        return self.recompute_ratio == AUTO_RATIO or self.max_ttft_s is not None

    def with_options(self, options: Mapping[str, Any]) -> CallOptions:
        """These options overridden by ``options``: fields of this class and of
        :class:`~cacheclip_rag.base.sampling.SamplingParams` by name, or under the names of frameworks
        (``max_new_tokens``, ``stop_sequences``). None is as if it was not given, but for ``documents``. A ratio or a
        time limit takes the place of both.

        Raises:
            ConfigurationError: an unknown option, an option given twice, or a value out of range.
        """
        sampling, own = ([each.name for each in fields(kind)] for kind in (SamplingParams, CallOptions))
        known = (*sampling, *own)
        refuse_unknown("call option", options, known)
        stated = {name: value for name, value in options.items() if value is not None or name == "documents"}
        named = by_real_names(stated, known)
        others = {"params": self.params, **{name: value for name, value in named.items() if name in own}}
        of_sampling = {name: value for name, value in named.items() if name in sampling}
        if of_sampling and isinstance(others["params"], SamplingParams):
            others["params"] = others["params"].with_options(of_sampling)
        ratio, limit = others.get("recompute_ratio"), others.get("max_ttft_s")
        if ratio is not None or limit is not None:
            own_limit = self.max_ttft_s if ratio == AUTO_RATIO else None
            others |= {"recompute_ratio": ratio, "max_ttft_s": own_limit if limit is None else limit}
        return replace(self, **others)

    def with_settings(self, config: EngineConfig) -> CallOptions:
        """These options with an engine's settings for finish, ratio and time limit where the call says nothing of them.
        A method instance has its own ratio."""
        ratio, limit = self.recompute_ratio, self.max_ttft_s
        if ratio is None and limit is None and (self.method is None or isinstance(self.method, str)):
            ratio, limit = config.recompute_ratio, config.max_ttft_s
        elif ratio == AUTO_RATIO and limit is None:
            limit = config.max_ttft_s
        finish = config.finish if self.finish is None else self.finish
        moved = config.moved if self.moved is None else self.moved
        return replace(self, recompute_ratio=ratio, max_ttft_s=limit, finish=finish, moved=moved)


class CallKeywords(SamplingKeywords, total=False):
    """Fields of :class:`CallOptions` as keywords of a call, beside ``params``. None is as if it was not given."""

    method: str | Method | None
    recompute_ratio: float | str | None
    max_ttft_s: float | None
    question: str | None
    documents: Documents
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    finish: str | None
    moved: str | None
    logprobs: int | None
    trace: bool | None


@dataclass(frozen=True, slots=True)
class Request:
    """One question to an engine."""

    prompt: Prompt | Sequence[Segment]
    method: Method
    """The method of ``options`` and the engine's settings."""
    options: CallOptions
    """What the caller said, with the engine's settings for the rest."""
