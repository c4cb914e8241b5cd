"""Runs hybrids, models with recurrent layers, on stored chunks: the KV of layers that attend, and the state maps of the
others (:mod:`.state_map`).

A state is made in the prompt's order and cannot be cut. So of a chunk all tokens are computed, or its first and last
ones alone: the first ones see what the convolutions keep of the text before, and text around a chunk may change the
tokens at its edges. Between them, the keys and values are written at their positions, and the map is applied to the
states. Every pass is the model's own, over neighbouring tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..base import KVMatch, KVPart, wait_for
from .architectures import has_pinned_rope, reuse_tokens, rope_pin
from .cache import FusedLayer, LatentLayer, cache_argument
from .model import device_of
from .rotary import ModelRotary, rotate, unrotate
from .state_map import Mixers, StateAndKVLayer, StateLayer, tails_of
from .stored_state_map import StateMapLayout, StoredSpan, StoredSpans
from .structure import decoder_of, find_structure, layers_of, ordinary_tokens, rotary_modules
from .text import TextModel, check_process


class RecurrentState:
    """A prompt, and its answer so far."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.ids = cache, list[int]()
        self._recurrent = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
        self._attending = [layer for layer in cache.layers if isinstance(layer, FusedLayer)]
        self._mark, self._kept = 0, list[Any]()
        self.num_plain = 0
        """First tokens that are there by passes over several: a map is rounded to the model's dtype, and one token may
        be computed otherwise (transformers' Nemotron-H does not clamp its step of time)."""
        self.token_bytes = sum(layer.token_bytes for layer in self._attending)

    def get_seq_length(self) -> int:
        return len(self.ids)

    def mark(self) -> None:
        """Keep the recurrent states of now."""
        self._mark, self._kept = len(self.ids), self._states()

    def _states(self) -> list[Any]:
        return [layer.kept() for layer in self._recurrent if self.ids]

    @property
    def ends_at(self) -> int:
        return len(self.ids) if self.num_plain == len(self.ids) else 0

    @property
    def state_bytes(self) -> int:
        kept = (
            each
            for layer in self._recurrent
            for each in (*layer.conv_states.values(), *layer.recurrent_states.values())
        )
        return sum(each.nbytes for each in kept if each is not None)

    def blocks(self, start: int, stop: int, size: int) -> Iterator[tuple[list[int], list[Any], list[Any]]]:
        """Token ids, KV of the layers that attend, and in the block that ends here the recurrent states."""
        for first in range(start, stop, size):
            last = min(first + size, stop)
            arrays = ((layer.keys[0, :, first:last], layer.values[0, :, first:last]) for layer in self._attending)
            kv = [(keys.clone(), values.clone()) for keys, values in arrays]
            yield self.ids[first:last], kv, self._states() if last == len(self.ids) else []

    @torch.inference_mode()
    def write_blocks(self, part: KVPart) -> None:
        for ids, kv, _ in part.blocks:
            for layer, (keys, values) in zip(self._attending, kv, strict=True):
                layer.write(len(self.ids), keys, values)
            self.ids += ids
        self.num_plain = len(self.ids)
        for layer, state in zip(self._recurrent, part.blocks[-1][2], strict=True):
            layer.put(*state)

    def back(self, num_tokens: int) -> list[int]:
        """Go back to the last mark that is not behind so many tokens, or to the beginning. Returns the tokens from
        there on, up to these."""
        if self._mark > num_tokens:  # what it kept is of other tokens from now on
            self._mark, self._kept = 0, []
        at = self._mark
        self.num_plain = min(self.num_plain, at)
        for number, layer in enumerate(self._recurrent):
            layer.reset()
            if at:
                layer.put(*self._kept[number])
        for layer in self.cache.layers:
            if isinstance(layer, FusedLayer):
                layer.cut(at)
        again = self.ids[at:num_tokens]
        del self.ids[at:]
        return again


class StateMapRuntime(TextModel):
    """One loaded hybrid. It computes in the prompt's order, and its stored KV is opaque (:mod:`.stored_state_map`)."""

    can_score = reads_kv = False
    can_extend = True
    kv_codec = "opaque"
    computed_edges = StateMapLayout.edges

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str,
        fingerprint: str,
        fuse: Callable[..., Any] | None = None,
        like: StateMapRuntime | None = None,
    ) -> None:
        """As of :class:`~.model.ModelRuntime`, but for ``fuse``: a function such as
        :func:`cacheclip_rag.fusion.in_order.fuse_in_order`. Raises UnsupportedModelError: the model's states, or its
        KV, cannot be moved."""
        super().__init__(model, tokenizer, name, like)
        config = model.config
        config.return_dict = True
        self.fingerprint, self._fuse = fingerprint, fuse
        self.rope_pin, self.pinned_rope = rope_pin(config), has_pinned_rope(config)
        self.context_tokens, self.reuse_tokens = config.max_position_embeddings, reuse_tokens(config)
        self.vocab_size, self.dtype = config.vocab_size, model.dtype
        self.device: torch.device = device_of(model.get_input_embeddings())
        layers = layers_of(model)
        self.num_layers = len(layers)
        self.layer_devices = [device_of(layer) for layer in layers]
        with torch.inference_mode():
            self.mixers = Mixers(decoder_of(model), layers, name, self.device, ordinary_tokens(model))
        structure, self.attending = find_structure(model, name, self.device, self.mixers)
        self._layer = LatentLayer if structure.is_latent else FusedLayer
        self.layout = StateMapLayout(structure.widths, self.mixers, self.dtype)
        self.num_kv_heads, self.head_dim, _ = map(max, zip(*structure.widths, strict=True))
        _use_own_attention(model)
        self.pass_lock: Any = threading.Lock() if self.pinned_rope else nullcontext()
        """Held during a pass: a pinned rotary module changes its frequencies in place."""
        devices = [self.layer_devices[number] for number in self.attending]
        modules = rotary_modules(model)
        self.rotary = ModelRotary(modules, structure.readings, self.dtype, name, devices, self.pass_lock)
        """Rotary tables of the layers that attend."""

    # -- what is stored -----------------------------------------------------------------------------------------------

    def kv_shape(self, num_tokens: int) -> tuple[int, ...]:
        return self.layout.kv_shape(num_tokens)

    @torch.inference_mode()
    def encode(self, ids: Sequence[int], context: torch.Tensor | None = None) -> torch.Tensor:
        own, start = self.layout.between(len(ids)), 0 if context is None else context.shape[3]
        if not own:
            return self.layout.written(ids, [], [])
        state = self.new_state(start + len(ids))
        if context is not None and start:
            before, spans = self.layout.read(context.flatten(), start, 0)
            self.run_all(state, before.tolist(), spans)
        self.run(state, ids[: own.start], head=False)
        tails = {number: tails_of(state.cache.layers[number]) for number in self.mixers}
        with self.mixers.calls() as calls:
            self.run(state, ids[own.start : own.stop], head=False)
        maps = [mixer.measure(calls[number], tails[number]) for number, mixer in self.mixers.items()]
        return self.layout.written(ids, keys_and_values(self, state, range(start + own.start, start + own.stop)), maps)

    # -- passes -------------------------------------------------------------------------------------------------------

    def new_state(self, capacity: int) -> RecurrentState:
        check_process(self.name, self._process)
        widths = dict(zip(self.attending, self.layout.widths, strict=True))
        layers = list[Any]()
        for number, (kind, device) in enumerate(zip(self.mixers.kinds, self.layer_devices, strict=True)):
            mixer, sizes = self.mixers.get(number), (widths.get(number), capacity, self.dtype, device)
            if mixer is not None and number in widths:
                layers.append(StateAndKVLayer(mixer.num_states, *sizes))
            elif mixer is not None:
                layers.append(StateLayer(mixer.num_states))
            elif number in widths:
                layers.append(self._layer(*sizes))  # type: ignore[arg-type]
            else:
                layers.append(DynamicLayer() if isinstance(kind, DynamicLayer) else type(kind)())
        return RecurrentState(Cache(layers=layers))

    def run(
        self, state: RecurrentState, ids: Sequence[int], *, head: bool = True, logits_to_keep: int = 1, moved: int = 0
    ) -> torch.Tensor | None:
        """Run tokens right after those of the state, at positions ``moved`` further. Returns as :meth:`extend`."""
        start = len(state.ids)
        decoder = decoder_of(self.model)
        arguments = {
            "input_ids": torch.tensor([[*ids]], device=self.device),
            "position_ids": torch.arange(start + moved, start + moved + len(ids), device=self.device)[None],
            "use_cache": True,
            **cache_argument(decoder, state.cache),
        }
        with self.pass_lock:
            if head:
                logits: torch.Tensor = self.model(**arguments, logits_to_keep=logits_to_keep).logits[0]
            else:
                decoder(**arguments)
        state.ids += ids
        if len(ids) > 1 and state.num_plain == start:
            state.num_plain += len(ids)
        return None if not head else logits[-1] if logits_to_keep == 1 else logits

    def _apply(self, state: RecurrentState, ids: Sequence[int], span: StoredSpan) -> None:
        """Go on by a stored span, which has these tokens."""
        tables = self.rotary.tables(torch.arange(span.start, span.stop))
        for number, (keys, values), of_layer in zip(self.attending, span.kv, tables, strict=True):
            layer = state.cache.layers[number]
            keys, values = keys.to(layer.device), values.to(layer.device)
            layer.write(span.start, rotate(keys, of_layer, layer.dtype), values)
        for (number, mixer), made in zip(self.mixers.items(), span.maps, strict=True):
            layer = state.cache.layers[number]
            old = layer.recurrent_states[mixer.index]
            tails = [tail[None].to(old.device, self.dtype) for tail in made.tails]
            layer.put(tails, made.apply(old).to(old.dtype), mixer.index)
        state.ids += ids

    def run_all(self, state: RecurrentState, ids: Sequence[int], spans: StoredSpans) -> torch.Tensor | None:
        """Run the tokens that no span has, in order. Returns the last run's logits."""
        edges = [len(state.ids), *(edge for span in spans for edge in (span.start, span.stop)), len(ids)]
        logits = None
        for number, (start, stop) in enumerate(pairwise(edges)):
            if number % 2:
                self._apply(state, ids[start:stop], spans[number // 2])
            elif start < stop:
                logits = self.run(state, ids[start:stop], head=stop == len(ids))
        return logits

    def prefill(self, ids: torch.Tensor, capacity: int) -> tuple[RecurrentState, torch.Tensor]:
        return self.compute_in_order(ids.tolist(), StoredSpans(), [(0, len(ids))], capacity)

    def begin(self, match: KVMatch, capacity: int) -> RecurrentState:
        state = self.new_state(capacity)
        match.write_to(state)
        return state

    @torch.inference_mode()
    def extend(
        self, state: RecurrentState, ids: torch.Tensor, start: int, *, head: bool = True, logits_to_keep: int = 1
    ) -> torch.Tensor | None:
        self.cut(state, start)
        state.mark()
        return self.run(state, ids.tolist(), head=head, logits_to_keep=logits_to_keep)

    @torch.inference_mode()
    def cut(self, state: RecurrentState, num_tokens: int) -> None:
        """States are not cut: what follows the last mark is computed again."""
        if num_tokens < len(state.ids) and (again := state.back(num_tokens)):
            self.run(state, again, head=False)

    @torch.inference_mode()
    def decode_step(self, state: RecurrentState, token_id: int) -> torch.Tensor:
        logits = self.run(state, [token_id])
        assert logits is not None, "one token was computed"
        return logits

    # -- fusion -------------------------------------------------------------------------------------------------------

    def place(self, match: KVMatch, used: Any, pieces: Iterable[Any]) -> tuple[StoredSpans, list[Any]]:
        """The tokens between the edges of stored pieces (:class:`~cacheclip_rag.fusion.in_order.PlacedKV`), and pieces
        that lack some of these."""
        spans, unread = StoredSpans(), list[Any]()
        if used and [*used] == [(0, match.num_tokens)]:  # else the prompt goes on before the end of an earlier one
            spans.match = match
        for piece in pieces:
            own = self.layout.between(piece.num_tokens)
            if piece.first > own.start or piece.first + piece.count < own.stop:
                unread.append(piece)
            else:
                spans += self.layout.read(piece.data, piece.num_tokens, piece.at - piece.first)[1]
        return spans, unread

    @torch.inference_mode()
    def compute_in_order(
        self, ids: Sequence[int], held: StoredSpans, runs: Iterable[tuple[int, int]], capacity: int, **_: Any
    ) -> tuple[RecurrentState, torch.Tensor]:
        state = self.begin(held.match, max(capacity, len(ids)))
        computed = [*runs]
        left = StoredSpans(span for span in held if not any(a <= span.start and span.stop <= b for a, b in computed))
        logits = self.run_all(state, ids, left)
        assert logits is not None, "the prompt's last token is computed"
        wait_for(logits.device)
        state.mark()
        return state, logits


def keys_and_values(
    runtime: StateMapRuntime, state: RecurrentState, slots: range, *, moved: int = 0
) -> list[torch.Tensor]:
    """Of each layer that attends, keys before RoPE, if they stand ``moved`` positions further, and values."""
    numbers, tables = list[torch.Tensor](), runtime.rotary.tables(torch.arange(slots.start, slots.stop) + moved)
    for number, of_layer in zip(runtime.attending, tables, strict=True):
        layer, own = state.cache.layers[number], slice(slots.start, slots.stop)
        numbers += [unrotate(layer.keys[0, :, own], of_layer), layer.values[0, :, own]]
    return numbers


def _use_own_attention(model: Any) -> None:
    """Transformers' own, of two the first one that a class has."""
    for name in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError):
            continue
        return
