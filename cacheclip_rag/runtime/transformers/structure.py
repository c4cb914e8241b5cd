"""What a decoder does with keys and values, seen from one pass instead of from its class's name.

The pass computes one token at several positions, of which each sees only itself. Its hidden states are then equal in
every layer, so that a layer's keys differ by their rotation alone: they show by which table it turns them, and which
dimensions. The masks that the model makes are compared with the attention's own, far beyond what the pass computes.
:mod:`.proof` compares the rest with the unmodified model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import causal_mask_function

from ...base.errors import ModelError, UnsupportedModelError, first_line, is_out_of_memory
from .attention import pattern_attention, span_of
from .attention_pattern import AttentionPattern, AttentionRule, Block
from .cache import cache_argument
from .kept import device_name, kept, kept_file
from .rotary import Reading, RotaryForm, Tables, made_tables, unrotate
from .state_map import Mixers
from .twin import described

_LOOK_NAME = "cacheclip-look"
_NUM_EMBEDDINGS = 4096
"""The first ones, among which tokens are chosen."""
_POSITIONS = (0, 1, 5, 17, 40, 1500)
"""The last one tells slow frequencies apart."""
_TOLERANCE = {torch.float32: 1e-2}
_ROUNDED = 8e-2
"""Largest difference of a pair of a key's numbers, turned back, from those at position 0, relative to their length; for
dtypes of 16 bits."""
_LEAST_LENGTH = 0.05
"""Of a pair, relative to the head's longest: shorter ones are rounding."""
_LONGEST_MASK = 1 << 15
"""Keys of a row whose masks are compared."""


@dataclass(frozen=True, slots=True)
class Structure:
    """What each layer that writes KV keeps of a token: all layers, or the first ones, if the others read what these
    wrote. A layer whose state is another one has it as one head: what turns, or is kept
    as it is, in the keys, and no values, ``(1, width, 0)``."""

    readings: tuple[Reading | None, ...]
    """How each layer turns its keys; None: it does not."""
    widths: tuple[tuple[int, int, int], ...]
    """Of each layer its number of KV heads and the widths of its keys and values."""
    is_latent: bool = False
    """What transformers gives the cache as values turns, and what it gives as keys does not
    (:class:`~.cache.LatentLayer`). Widths are those of what turns, and of what does not."""
    reads_cached: bool = True
    """Whether attention reads each layer's keys and values as they are cached."""

    @classmethod
    def of(cls, readings: list[Any], widths: list[Any], is_latent: bool, reads_cached: bool) -> Structure:
        """Of fields that were read from JSON."""
        made = (each and Reading(each[0], each[1], each[2], RotaryForm(*each[3]), each[4]) for each in readings)
        sizes = tuple((int(heads), int(keys), int(values)) for heads, keys, values in widths)
        return cls(tuple(made), sizes, bool(is_latent), bool(reads_cached))


class _Unclear(Exception):
    """Why the structure is not known."""


def decoder_of(model: Any) -> Any:
    """The part of a model that has its layers."""
    return model.base_model


def layers_of(model: Any) -> torch.nn.ModuleList:
    """The decoder layers. Raises UnsupportedModelError: they are not where they are expected."""
    decoder = decoder_of(model)
    for name in ("layers", "h", "blocks"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == model.config.num_hidden_layers:
            return layers
    raise UnsupportedModelError(
        f"{type(model).__name__} of transformers has its {model.config.num_hidden_layers} decoder layers in no list of "
        "layers. Expected one, to write stored KV before each. Run it with transformers itself, without reuse."
    )


def rotary_modules(model: Any) -> list[Any]:
    """Modules beside the layers that make rotary tables."""
    parts = decoder_of(model).named_children()
    return [part for name, part in parts if "rotary" in f"{name} {type(part).__name__}".lower() or "rope" in name]


def kept_structure(model: Any, name: str, device: torch.device, fingerprint: str) -> Structure:
    """:func:`find_structure`, unless it is known: a ``fingerprint`` tells models of a class apart, an empty one does
    not."""

    def find() -> Structure:
        return find_structure(model, name, device)[0]

    if not fingerprint:
        return find()
    file = kept_file("structures", described(model), fingerprint, device_name(device))
    return kept(file, lambda fields: Structure.of(**fields), find, asdict)


@torch.inference_mode()
def find_structure(
    model: Any, name: str, device: torch.device, mixers: Mixers | None = None
) -> tuple[Structure, list[int]]:
    """Look at a model that was just loaded, whose input is on ``device``, and whose recurrent layers have ``mixers``.
    Returns also which layers attend. Raises UnsupportedModelError with the reason, if its KV cannot be moved;
    ModelError: what it computes are no numbers."""
    AttentionInterface.register(_LOOK_NAME, _look)
    AttentionMaskInterface.register(_LOOK_NAME, _long_mask)
    layers, own = layers_of(model), model.config._attn_implementation
    model.set_attn_implementation(_LOOK_NAME)
    try:
        attending, written, reads_cached = _written(model, len(layers), device, mixers)
        for each in chain(*written):
            check_numbers(each, name)
        is_latent = all(_depends(values) and not _depends(keys) for keys, values in written)
        if is_latent:
            written = [(values, keys) for keys, values in written]
        widths = tuple((len(keys), keys.shape[2], values.shape[2]) for keys, values in written)
        return Structure(tuple(_readings(model, written)), widths, is_latent, reads_cached), attending
    except _Unclear as error:
        raise UnsupportedModelError(
            f"model {name!r} ({model.config.model_type!r}) cannot be reused exactly: {error}. Choose another model, "
            "such as Llama, Qwen3 or Gemma 3, or run this one with transformers itself, without reuse."
        ) from None
    finally:
        model.set_attn_implementation(own)


def ordinary_tokens(model: Any) -> torch.Tensor:
    """Tokens, among the first, whose embeddings have an ordinary length. Those of tokens that were never trained may be
    zero, which tells nothing."""
    weight = model.get_input_embeddings().weight[:_NUM_EMBEDDINGS]
    if not weight.is_meta:  # accelerate moves it in passes only
        lengths: torch.Tensor = torch.linalg.vector_norm(weight.detach(), dim=-1, dtype=torch.float32).cpu()
        typical = lengths[lengths > 0].median()  # NaN if there are none
        tokens = ((lengths > typical / 2) & (lengths < 2 * typical)).nonzero()[:, 0]
        if len(tokens):
            return tokens
    return torch.arange(len(weight))


def check_numbers(computed: torch.Tensor, name: str) -> None:
    """Raise ModelError if what a model computes has NaN."""
    if computed.isnan().any():
        raise ModelError(
            f"what model {name!r} computes are no numbers (NaN): its weights are damaged, or too large for this dtype. "
            "Fetch it again, or use float32."
        )


@dataclass(slots=True)
class _Sight:
    """What the attention of a pass saw."""

    pattern: AttentionPattern
    cache: DynamicCache
    reads_cached: bool = True
    layers: set[int] = field(default_factory=set)
    masks: set[tuple[int, int | None, int | None]] = field(default_factory=set)
    """Masks, by their ``id``, that a window and a length of chunks were compared with."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """The same, so that their ids stay theirs."""


def _written(
    model: Any, num_layers: int, device: torch.device, mixers: Mixers | None
) -> tuple[list[int], list[tuple[torch.Tensor, torch.Tensor]], bool]:
    """Layers that attend, and of each keys after RoPE and values of one token at :data:`_POSITIONS`, each
    ``(num_kv_heads, num_rows, head_dim)``; and whether attention reads them as they are cached."""
    count = len(_POSITIONS)
    blocks = [Block.of(slice(i, i + 1), slice(i, i + 1), torch.zeros(1, dtype=torch.int64)) for i in range(count)]
    sight = _Sight(AttentionPattern(blocks), cache := DynamicCache())
    if mixers is not None:
        cache.layers = [DynamicLayer() if isinstance(kind, DynamicLayer) else type(kind)() for kind in mixers.kinds]
    tokens = ordinary_tokens(model)
    try:
        with nullcontext() if mixers is None else mixers.alone():
            decoder_of(model)(
                input_ids=torch.full((1, count), int(tokens[len(tokens) // 2]), device=device),
                position_ids=torch.tensor([_POSITIONS], device=device),
                use_cache=True,
                cacheclip_look=sight,
                **cache_argument(decoder_of(model), cache),
            )
    except UnsupportedModelError as error:
        raise _Unclear(first_line(error)) from None
    except _Unclear:
        raise
    except Exception as error:  # a class of any form
        if is_out_of_memory(error):
            raise
        raise _Unclear(f"one pass failed ({type(error).__name__}: {first_line(error)})") from error
    attending = [n for n in range(num_layers) if mixers is None or _holds_kv(cache.layers[n])]
    if sight.layers != {*attending}:
        raise _Unclear("its layers do not attend through transformers' AttentionInterface")
    layers = [layer for number, layer in enumerate(cache.layers) if mixers is None or number in sight.layers]
    for layer in layers:
        if not _holds_kv(layer) or layer.keys.shape[2] != count:
            raise _Unclear("its layers do not each keep keys and values of every token")
    return attending, [(layer.keys[0], layer.values[0]) for layer in layers], sight.reads_cached


def _holds_kv(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and layer.is_initialized


def _look(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """The attention function of the pass."""
    sight: _Sight | None = kwargs.pop("cacheclip_look", None)
    if sight is None:
        raise _Unclear("it hands no arguments on to its attention")
    rule = AttentionRule(1.0, window=kwargs.get("sliding_window"), span=span_of(module))
    known = id(attention_mask), rule.window, rule.span
    if attention_mask is not None and known not in sight.masks:
        _check_mask(attention_mask, rule)
        sight.masks.add(known)
        sight.kept.append(attention_mask)
    sight.layers.add(module.layer_idx)
    own = sight.cache.layers[module.layer_idx : module.layer_idx + 1]
    sight.reads_cached &= all(torch.equal(key, each.keys) and torch.equal(value, each.values) for each in own)
    pattern_attention(module, query, key, value, None, cacheclip_pattern=sight.pattern, **kwargs)  # knows its inputs
    # a row sees itself alone; sinks would weigh it by a product whose rounding depends on the position
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _long_mask(mask_function: Callable[..., Any] = causal_mask_function, device: Any = None, **kwargs: Any) -> Any:
    """In the place of a mask for the pass: what a model's mask says of :func:`_rows` of a long prompt, ``(1, 1,
    num_rows, num_keys)``."""
    rows, keys = _rows(device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    return mask_function(first, first, rows[:, None], keys[None, :]).expand(len(rows), len(keys))[None, None]


def _rows(device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    last = _LONGEST_MASK - 2
    return torch.tensor([0, 1, 100, last // 3, last], device=device), torch.arange(_LONGEST_MASK, device=device)


def _check_mask(mask: Any, rule: AttentionRule) -> None:
    rows, keys = _rows(mask.device)
    expected = keys <= rows[:, None]
    if (before := rule.hides(keys, rows[:, None])) is not None:
        expected &= ~before
    if mask.shape[2:] != expected.shape or not torch.equal(mask[0, 0], expected):
        limits = "".join(
            f" in {what} of {size}" for what, size in (("a window", rule.window), ("chunks", rule.span)) if size
        )
        raise _Unclear(f"its rows see other keys than those before them{limits}")


def _readings(model: Any, written: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Reading | None]:
    """How each layer turns its keys."""
    candidates = sorted(_candidates(model), key=lambda each: each[0].is_backward)
    for number, (keys, values) in enumerate(written):
        limit = _TOLERANCE.get(keys.dtype, _ROUNDED)
        if _depends(values):
            raise _Unclear(f"values of layer {number} depend on the position")
        fits: dict[Reading | None, float] = {None: _spread(keys.float(), RotaryForm(), 0)}
        if fits[None] > limit:
            for reading, tables in candidates:
                if reading.is_backward and min(fits.values()) <= limit:
                    break
                if (width := tables.cos.shape[-1]) <= keys.shape[-1]:
                    of_layer = tables.map(partial(torch.Tensor.to, device=keys.device))
                    fits[reading] = _spread(unrotate(keys, of_layer), reading.form, width)
        best = min(fits, key=lambda reading: fits[reading])
        if not fits[best] <= limit:
            raise _Unclear(f"keys of layer {number} depend on the position in a way that is not known")
        yield best


def _depends(rows: torch.Tensor) -> bool:
    """Whether rows ``(num_heads, num_rows, dim)`` of one token depend on the position."""
    return _spread(rows.float(), RotaryForm(), 0) > _TOLERANCE.get(rows.dtype, _ROUNDED)


def _candidates(model: Any) -> Iterator[tuple[Reading, Tables]]:
    """Every reading of every rotary module, and its tables at :data:`_POSITIONS`."""
    kinds = ["", *dict.fromkeys(getattr(model.config, "layer_types", None) or ())]
    for (number, module), kind in product(enumerate(rotary_modules(model)), kinds):
        try:
            made = made_tables(module, kind, torch.tensor(_POSITIONS))
        except Exception:  # it takes other arguments
            continue
        is_complex = isinstance(made, torch.Tensor)
        for columns in ("complex",) if is_complex else ("halves", "pairs", "single"):
            for in_pairs, at_end, is_backward in product((False, True), repeat=3):
                reading = Reading(number, kind, columns, RotaryForm(in_pairs, at_end), is_backward)
                try:
                    yield reading, reading.read(made)
                except Exception:  # it returns something else
                    continue


def _spread(rows: torch.Tensor, form: RotaryForm, width: int) -> float:
    """How far rows ``(num_heads, num_rows, dim)`` are from being equal: the largest difference of a pair of numbers
    that turn together, in the first or last ``width`` dimensions, relative to its length."""
    first = rows.shape[-1] - width if form.at_end else 0
    turned = rows[..., first : first + width]
    num_pairs = width // 2
    # (num_heads, num_rows, num_pairs, 2)
    pairs = turned.unflatten(-1, (num_pairs, 2) if form.in_pairs else (2, num_pairs))
    pairs = pairs if form.in_pairs else pairs.transpose(-1, -2)
    others = torch.cat((rows[..., :first], rows[..., first + width :]), dim=-1).unsqueeze(-1)
    spread = 0.0
    longest = rows.norm(dim=-1).amax(dim=1)[:, None] / max(1, rows.shape[-1]) ** 0.5  # by head
    for each in (pairs, others):
        if each.numel():
            length = torch.maximum(each[:, 0].norm(dim=-1), _LEAST_LENGTH * longest).clamp(min=1e-6)
            spread = max(spread, float(((each - each[:, :1]).norm(dim=-1).amax(dim=1) / length).max()))
    return spread
