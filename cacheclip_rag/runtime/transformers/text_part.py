"""The text part of a multimodal checkpoint: its decoder and its output layer, as a causal language model.

What reads images and sound is dropped. Passes go to the decoder itself: what the whole model does before it, for
instance to look for images, changes nothing for text, and keeps state from call to call.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...base.errors import UnsupportedModelError

_LIMITS = {torch.float32: 1e-4}
_ROUNDED = 5e-2
"""Largest difference of the whole model's logits, as a share of the largest one; for dtypes of 16 bits."""


class TextPart(nn.Module):
    """Decoder and output layer of a ``…ForConditionalGeneration``."""

    def __init__(self, whole: Any, ids: torch.Tensor, name: str) -> None:
        """``ids``: ``(num_tokens,)`` tokens of text, for which both must have the same logits. Raises
        UnsupportedModelError: they have not."""
        super().__init__()
        decoder = whole.get_decoder()
        self.base_model = decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4 gives both
        self._head = whole.get_output_embeddings()
        self.config = self.base_model.config
        self.generation_config = whole.generation_config
        self._softcap, self._scale = _changes_of_logits(whole, self, ids, name)

    def with_decoder(self, decoder: Any) -> TextPart:
        """The same with another decoder of the class, and an output layer that fits it."""
        part = TextPart.__new__(TextPart)
        nn.Module.__init__(part)
        part.base_model, part.config, part.generation_config = decoder, decoder.config, self.generation_config
        part._head = nn.Linear(decoder.config.hidden_size, decoder.config.vocab_size, bias=False)
        part._softcap, part._scale = self._softcap, self._scale
        return part

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.base_model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.base_model.device
        return device

    def get_input_embeddings(self) -> Any:
        return self.base_model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self._head

    def set_attn_implementation(self, name: str) -> None:
        self.base_model.set_attn_implementation(name)

    def forward(self, *, logits_to_keep: int = 0, **arguments: Any) -> Any:
        output = self.base_model(**arguments)
        logits = self._head(output.last_hidden_state[:, -logits_to_keep:]) * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return CausalLMOutputWithPast(logits=logits)


@torch.inference_mode()
def _changes_of_logits(whole: Any, part: TextPart, ids: torch.Tensor, name: str) -> tuple[float | None, float]:
    """Softcap and scale by which the whole model changes its logits: not every class does what its text model does."""
    config = part.config
    softcaps = dict.fromkeys((None, getattr(config, "final_logit_softcapping", None)))
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    rows = ids[None].to(whole.get_input_embeddings().weight.device)
    expected = whole(input_ids=rows, use_cache=False).logits.float()
    limit = _LIMITS.get(part.dtype, _ROUNDED) * float(expected.abs().max())
    for part._softcap, part._scale in product(softcaps, dict.fromkeys((1.0, float(scale)))):
        if float((part(input_ids=rows, use_cache=False).logits.float() - expected).abs().max()) <= limit:
            return part._softcap, part._scale
    raise UnsupportedModelError(
        f"the text part of model {name!r} ({whole.config.model_type!r}) has other logits than the whole model, so it "
        "cannot be run alone. Choose another model, or run this one with transformers itself, without reuse."
    )


def is_multimodal(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config
