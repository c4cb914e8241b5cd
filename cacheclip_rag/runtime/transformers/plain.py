"""Models whose KV cannot be reused. With ``fallback="full"`` they answer by plain prefill.

Attention, cache (or recurrent state) and positions are transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .architectures import has_pinned_rope, reuse_tokens
from .text import TextModel

if TYPE_CHECKING:
    from ...clock import PhaseClock
    from ...types import Plan
    from ..base import Fused

__all__ = ["PlainRuntime", "PlainState", "auto_classes"]

_STATES = ("cache", "past_key_values", "cache_params", "state", "encoder_outputs")
"""Output fields that the next step needs. Since 5.24, transformers calls attention and recurrent states ``cache``."""


@dataclass(slots=True)
class PlainState:
    """State of a model between two tokens of an answer."""

    arguments: dict[str, Any]
    """Keyword arguments of the next pass, except its token."""
    num_tokens: int

    def get_seq_length(self) -> int:
        return self.num_tokens

    def position_of(self, slot: int) -> int:
        """Position of a slot: the same number."""
        return slot


def auto_classes() -> Iterator[Any]:
    """Transformers' auto classes that can answer a text prompt, in the order to try them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    yield from (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)


class PlainRuntime(TextModel):
    """A model that only prefills and decodes; ``unsupported`` says why its KV cannot be reused."""

    can_reuse = can_score = keeps_prefixes = False

    def __init__(self, model: Any, tokenizer: Any, *, name: str, fingerprint: str, unsupported: str) -> None:
        super().__init__(model, tokenizer, name)
        self.unsupported: str = unsupported
        config = model.config.get_text_config(decoder=True)
        self.fingerprint = fingerprint
        self.rope_pin = ""
        self.context_tokens: int = getattr(config, "max_position_embeddings", None) or 2**31
        """A recurrent model has no limit."""
        self.pinned_rope = has_pinned_rope(config)
        self.reuse_tokens = reuse_tokens(config) if self.pinned_rope else 0
        parameters = inspect.signature(model.forward).parameters
        # in older versions of transformers, recurrent models do not count their tokens
        self._wants_cache_position = "cache_position" in parameters
        # logits of a whole prompt can take more memory than the model
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device

    @torch.inference_mode()
    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[PlainState, torch.Tensor]:
        ids = ids[None].to(self.device)
        if not self.model.config.is_encoder_decoder:
            return self._step(PlainState({}, 0), ids)
        encoded = self.model.get_encoder()(input_ids=ids)
        first = self.model.generation_config.decoder_start_token_id
        if first is None:
            first = self.model.config.decoder_start_token_id
        start = torch.tensor([[first]], device=self.device)
        return self._step(PlainState({"encoder_outputs": encoded}, ids.shape[1]), start)

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError(f"KV of model {self.name!r} cannot be reused")

    def fuse(self, plan: Plan, sources: Any, *, capacity: int, clock: PhaseClock, trace: bool = False) -> Fused | None:
        return None

    @torch.inference_mode()
    def decode_step(self, state: PlainState, token_id: int) -> torch.Tensor:
        after, logits = self._step(state, torch.tensor([[token_id]], device=self.device))
        state.arguments, state.num_tokens = after.arguments, after.num_tokens
        return logits

    def _step(self, state: PlainState, ids: torch.Tensor) -> tuple[PlainState, torch.Tensor]:
        given = {"decoder_input_ids" if self.model.config.is_encoder_decoder else "input_ids": ids}
        if "cache_params" in state.arguments and self._wants_cache_position:
            given["cache_position"] = torch.tensor([state.num_tokens], device=self.device)
        output = self.model(**given, **state.arguments, **self._last_logits, use_cache=True)
        fields = dict(output.items())  # without those that are None, and without deprecated names
        arguments = {**state.arguments, **{name: fields[name] for name in _STATES if name in fields}}
        return PlainState(arguments, state.num_tokens + ids.shape[1]), output.logits[0, -1]
