"""A transformers model without its weights: tokenizer, config, fingerprint and rotary tables.

It plans prompts for another process that has the weights, in seconds less and gigabytes less than the model itself. Its
keys of the store are those of the loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...base.errors import ModelError, UnsupportedModelError
from .kept import kept, kept_file
from .model import ModelRuntime
from .proof import verdict_of_twin
from .rotary import rotate, unrotate
from .short_convolution import install_short_convolutions
from .structure import Structure, find_structure, layers_of, rotary_modules
from .twin import described, make_twin

Encoder = Callable[[Sequence[Sequence[int]], torch.Tensor | None], list[torch.Tensor]]
"""Computes the KV of chunks, as :meth:`~cacheclip_rag.runtime.base.Runtime.encode_many`."""


def planned_structure(model: Any, name: str, device: torch.device, fingerprint: str) -> Structure:
    """That of a tiny model with all layers: there are no weights to look at. Raises UnsupportedModelError: its layers
    keep KV in several shapes, or in another one than engines that are planned for."""

    def find() -> Structure:
        try:
            twin = make_twin(model, is_deep=True)
        except ValueError as error:
            raise _unplanned(model, name, f"no tiny model can be made ({error})") from error
        if install_short_convolutions(layers_of(twin), twin.config):
            raise _unplanned(model, name, "it has layers that convolve")
        seen, _ = find_structure(twin, name, torch.device("cpu"))
        if not seen.reads_cached:
            raise _unplanned(model, name, "its attention, latent for instance, does not read keys and values as cached")
        is_uniform = len(seen.widths) == model.config.num_hidden_layers and len({*seen.widths}) == 1
        if not is_uniform or seen.widths[0] != _widths(twin.config):
            raise _unplanned(model, name, "its layers keep KV of several shapes, for which engines have several caches")
        return replace(seen, widths=(_widths(model.config),) * len(seen.widths))

    return kept(kept_file("planned", described(model)), lambda fields: Structure.of(**fields), find, asdict)


def _widths(config: Any) -> tuple[int, int, int]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads, head_dim, head_dim


def _unplanned(model: Any, name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"prompts of model {name!r} ({model.config.model_type!r}) cannot be planned without its weights: {why}. Answer "
        "with CacheClipEngine, which loads it."
    )


class PlanningRuntime(ModelRuntime):
    """Tokenises, lays out and rotates. Whatever needs weights raises ModelError."""

    can_score = keeps_prefixes = can_extend = False
    _find_structure = staticmethod(planned_structure)
    _encoder: Encoder | None = None
    files: tuple[object, ...] = ()
    """States of the files behind the fingerprint."""

    def __init__(
        self, folder: Path, config: Any, tokenizer: Any, *, name: str, fingerprint: str, dtype: torch.dtype
    ) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        base = model.base_model
        for part, module in [*base.named_children()]:
            if any(module is each for each in rotary_modules(model)):  # whose frequencies are computed, not loaded
                setattr(base, part, type(module)(config=base.config))
        super().__init__(model, tokenizer, name=name, fingerprint=fingerprint)
        self.device = torch.device("cpu")
        self.layer_devices[:] = [self.device] * self.num_layers
        if verdict_of_twin(self, ModelRuntime) is None:
            raise _unplanned(model, name, "no tiny model can be made")

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a token's KV in the model's dtype."""
        return math.prod(self.kv_shape(1)) * self.dtype.itemsize

    def _refuse(self) -> NoReturn:
        raise ModelError(
            f"model {self.name!r} was opened without its weights, which only plans prompts. Load it with an engine of "
            "its own to compute KV, for instance: cacheclip ingest."
        )

    def encoding_by(self, encoder: Encoder, *, batch_characters: int, max_tokens: int | None = None) -> PlanningRuntime:
        """The same model, whose chunks, of ``max_tokens`` with what comes before them at most, another process
        encodes."""
        other = copy(self)
        other._encoder, other.batch_characters = encoder, batch_characters
        other.reuse_tokens = min(self.reuse_tokens, max_tokens or self.reuse_tokens)
        return other

    def placed(self, kv: torch.Tensor) -> torch.Tensor:
        """Position-free KV of a prompt's first tokens, ``(num_layers, 2, num_kv_heads, num_tokens, head_dim)``, as the
        model has it: keys after RoPE, in its dtype."""
        tables = self.rotary.tables(torch.arange(kv.shape[3]))
        layers = [
            torch.stack([rotate(keys, of_layer), values]) for (keys, values), of_layer in zip(kv, tables, strict=True)
        ]
        return torch.stack(layers).to(self.dtype)

    def position_free(self, kv: torch.Tensor, start: int) -> torch.Tensor:
        """KV of neighbouring tokens from position ``start`` on as it is stored, with keys before RoPE, in the model's
        dtype. ``kv`` has the shape of :meth:`placed`, with keys after RoPE, and is overwritten."""
        tables = self.rotary.tables(torch.arange(start, start + kv.shape[3]))
        for layer, of_layer in zip(kv, tables, strict=True):
            layer[0] = unrotate(layer[0], of_layer).to(kv.dtype)
        return kv.to(self.dtype)

    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        return self.encode_many([ids], context)[0]

    def encode_many(self, chunks: Sequence[Sequence[int]], context: torch.Tensor | None = None) -> list[torch.Tensor]:
        if self._encoder is None:
            self._refuse()
        return self._encoder(chunks, context)

    def prefill(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def run_rows(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def decode_step(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def new_cache(self, capacity: int, *, one_layer: bool = False) -> NoReturn:
        self._refuse()
