"""What recurrent layers do to their state over some tokens: an affine map, S becomes A S + B.

Nothing here knows a class's gates. The model's own module is run over the tokens' inputs from the zero state, which
gives B, and from unit states, which gives A. Maps compose exactly: HYPIC (arXiv:2607.01299) does so for layers of
linear attention. Departure: A is measured, so that Mamba-2 and others need no code of their own.

The layer also keeps the last inputs of a short convolution. What follows a map sees those that were stored with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import BoundArguments, signature
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ...base.errors import UnsupportedModelError, first_line, is_out_of_memory
from .cache import FusedLayer, cache_argument

LinearAttentionLayer: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""What transformers keeps of a recurrent layer; None in versions that are too old."""
_TOLERANCE = {torch.float32: 1e-3}
_ROUNDED = 5e-2
"""Largest difference of what a map does to a state from what the module does, relative to it; for 16 bits."""
_CLEARLY, _EQUAL = 4, 1e-6
"""A is a number unless that differs as many times more than a matrix, and more than what float32 rounds."""
_PROBE_TOKENS = (5, 2)
"""Tokens before those whose map is measured when a model is loaded, and these: few, after which A is not yet 0."""


class StateMap(NamedTuple):
    """What some tokens do to a layer's state, and what the layer keeps after them."""

    factor: torch.Tensor
    """A: a number, ``(num_heads, 1, 1)``, or a matrix, ``(num_heads, rows, rows)``, by which each head's state is
    multiplied (Mamba-2; the delta rule)."""
    offset: torch.Tensor
    """B, ``(num_heads, rows, columns)``, as the state."""
    tails: tuple[torch.Tensor, ...]
    """Last inputs of each convolution, ``(num_channels, kernel_size)``."""

    def apply(self, state: torch.Tensor) -> torch.Tensor:
        """A S + B in float32, of a state ``(1, num_heads, rows, columns)``."""
        factor, offset = (each.to(state.device, torch.float32) for each in self[:2])
        return (factor @ state.float() if factor.shape[-1] > 1 else factor * state.float()) + offset


class StateLayer(LinearAttentionLayer or DynamicLayer):  # type: ignore[misc]
    """What one recurrent layer keeps."""

    def put(self, tails: Sequence[torch.Tensor], state: torch.Tensor, index: int) -> None:
        """Put the inputs of convolutions, ``(1, num_channels, kernel_size)``, and a state, the one with the number
        ``index``, in place of what is there."""
        for number, tail in enumerate(tails):
            self.conv_states[number], self.conv_kernel_size[number] = tail.clone(), tail.shape[-1]
            self.is_conv_states_initialized[number] = self.has_previous_state[number] = True
        self.recurrent_states[index] = state.clone()
        self.is_recurrent_states_initialized[index] = self.has_previous_state[index] = True

    def kept(self) -> tuple[list[torch.Tensor], torch.Tensor, int]:
        """Copies of what it keeps, as :meth:`put` takes them."""
        return next((tails_of(self), each.clone(), n) for n, each in self.recurrent_states.items() if each is not None)


class StateAndKVLayer(StateLayer, FusedLayer):
    """The same of a layer that attends, too."""

    def __init__(self, number_of_states: int, *sizes: Any) -> None:
        StateLayer.__init__(self, number_of_states)  # type: ignore[call-arg]
        FusedLayer.__init__(self, *sizes)


def tails_of(layer: Any) -> list[torch.Tensor]:
    """Copies of what a layer keeps of its convolutions' inputs."""
    return [tail.clone() for tail in layer.conv_states.values() if tail is not None]


@dataclass(eq=False, slots=True)
class Mixer:
    """The recurrent module of a layer."""

    number: int
    """Of the layer."""
    module: nn.Module
    index: int
    """Of its state, among those that the layer may keep."""
    num_states: int
    is_matrix: bool = False
    """Whether A is a matrix for each head."""
    state: torch.Tensor | None = None
    tails: Sequence[torch.Tensor] = ()
    """What it keeps, for sizes and dtypes."""

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of its :class:`StateMap`: factor, offset and tails."""
        assert self.state is not None, "a model was run"
        heads, rows, columns = self.state.shape[1:]
        size = rows if self.is_matrix else 1
        return [(heads, size, size), (heads, rows, columns), *(tuple(tail.shape[1:]) for tail in self.tails)]

    def measure(self, call: BoundArguments, tails: Sequence[torch.Tensor]) -> StateMap:
        """The map of the tokens whose inputs a ``call`` of the module has, after ``tails``."""
        assert self.state is not None, "a model was run"
        offset, after = self.run(call, tails, torch.zeros_like(self.state))

        def moved(unit: torch.Tensor) -> torch.Tensor:
            return self.run(call, tails, unit)[0][0].float() - offset[0].float()

        (heads, size, _), (_, _, columns), *_ = self.shapes
        factor = torch.zeros(heads, size, size, device=offset.device)
        if not self.is_matrix:
            factor[:] = moved(torch.ones_like(offset))[..., :1, :1]
        for first in range(
            0, size if self.is_matrix else 0, columns
        ):  # as much of the identity as a state has room for
            own = torch.arange(min(columns, size - first))
            unit = torch.zeros_like(offset)
            unit[..., first + own, own] = 1
            factor[..., first : first + len(own)] = moved(unit)[..., : len(own)]
        return StateMap(factor, offset[0], tuple(tail[0] for tail in after))

    def run(
        self, call: BoundArguments, tails: Sequence[torch.Tensor], state: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The state after the module's ``call`` from ``state``, and the inputs that it keeps."""
        layer = StateLayer(self.num_states)
        layer.put(tails, state, self.index)
        own = Cache(layers=[layer] * (self.number + 1))
        _call(self.module.forward, call, lambda value: own if isinstance(value, Cache) else value)
        return layer.recurrent_states[self.index], tails_of(layer)

    def try_on(self, call: BoundArguments, layer: Any, before: Sequence[torch.Tensor]) -> bool:
        """Whether a call of the module, after the inputs ``before``, is a map that is known. ``layer``: what it
        keeps."""
        self.state, self.tails = layer.recurrent_states[self.index], tails_of(layer)
        if self.state.dim() != 4:
            return False
        state = torch.randn(self.state.shape, generator=torch.Generator().manual_seed(3)).to(self.state)
        expected = self.run(call, before, state)[0].float()
        limit = _TOLERANCE.get((self.tails or [state])[0].dtype, _ROUNDED)
        errors = dict[bool, torch.Tensor]()
        for self.is_matrix in (False, True):
            made = self.measure(call, before)
            errors[self.is_matrix] = (made.apply(state) - expected).norm()
        size = (expected - made.offset).norm()
        self.is_matrix = not errors[False] <= max(_CLEARLY * errors[True], _EQUAL * size)
        return bool(errors[self.is_matrix] <= limit * size)


def _call(forward: Any, call: BoundArguments, change: Callable[[Any], Any]) -> Any:
    """Call a module as before, with other values of arguments and no mask."""
    arguments = {name: None if name == "attention_mask" else change(value) for name, value in call.arguments.items()}
    again = BoundArguments(call.signature, arguments)
    return forward(*again.args, **again.kwargs)


class Mixers(dict[int, Mixer]):
    """The recurrent modules of a decoder by layer, found by running it."""

    def __init__(self, decoder: Any, layers: Iterable[nn.Module], name: str, device: torch.device, ids: torch.Tensor):
        """``ids``: ``(num_tokens,)`` ordinary tokens, on which they are tried. Raises UnsupportedModelError: there are
        none, or what they do to their states is no map that is known."""

        def refuse(why: str) -> NoReturn:
            raise UnsupportedModelError(
                f"model {name!r} has recurrent layers, and {why}. Choose another model, such as Llama, Qwen3 or Gemma "
                "3, or run this one with transformers itself, without reuse."
            )

        if LinearAttentionLayer is None:
            refuse("this version of transformers keeps no state that can be moved: update transformers")
        cache = DynamicCache(config=decoder.config)
        self.kinds: list[Any] = [*cache.layers]
        """Of each layer what transformers keeps of it."""
        before, stop = _PROBE_TOKENS[0], sum(_PROBE_TOKENS)
        ids = ids[torch.arange(stop) * 7 % len(ids)][None].to(device)
        arguments = {"use_cache": True, **cache_argument(decoder, cache)}
        positions = torch.arange(stop, device=device)[None]
        try:
            with _hooks(self._finding(layers)):
                decoder(input_ids=ids[:, :before], position_ids=positions[:, :before], **arguments)
            tails = {number: tails_of(cache.layers[number]) for number in self}
            with self.calls() as calls:
                decoder(input_ids=ids[:, before:], position_ids=positions[:, before:], **arguments)
        except Exception as error:  # a class of any form
            if is_out_of_memory(error):
                raise
            refuse(f"a pass with a cache of transformers' own failed ({type(error).__name__}: {first_line(error)})")
        if not self:
            refuse("its layers keep no state that is known")
        for number, mixer in self.items():
            if not mixer.try_on(calls[number], cache.layers[number], tails[number]):
                refuse(f"what those of layer {number} do to their state is no affine map that is known")

    def _finding(self, layers: Iterable[nn.Module]) -> Iterator[Any]:
        """Hooks that find of each layer the innermost module whose pass makes a state."""
        begun = set[int]()

        def enter(made: dict[int, bool], module: nn.Module) -> None:
            if not any(made.values()):
                begun.add(id(module))

        def leave(number: int, made: dict[int, bool], module: nn.Module) -> None:
            if id(module) in begun and number not in self and any(made.values()):
                self[number] = Mixer(number, module, [*made.values()].index(True), len(made))

        for number, (layer, state) in enumerate(zip(layers, self.kinds, strict=False)):
            for part in layer.modules() if isinstance(state, LinearAttentionLayer) else ():
                if part is not layer:
                    made = state.is_recurrent_states_initialized
                    yield part.register_forward_pre_hook(lambda module, _, made=made: enter(made, module))
                    yield part.register_forward_hook(lambda module, *_, n=number, made=made: leave(n, made, module))

    @contextmanager
    def calls(self) -> Iterator[dict[int, BoundArguments]]:
        """The arguments of the modules in a pass of this thread, by layer."""
        calls: dict[int, BoundArguments] = {}
        thread = threading.get_ident()

        def keep(number: int, module: Any, args: Any, kwargs: Any = None) -> None:
            # a hook that another thread removes during a pass is called without keywords
            if threading.get_ident() == thread and kwargs is not None:
                calls[number] = signature(module.forward).bind(*args, **kwargs)

        with _hooks(
            mixer.module.register_forward_pre_hook(lambda *call, n=number: keep(n, *call), with_kwargs=True)
            for number, mixer in self.items()
        ):
            yield calls

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block in which each token is the first one for the modules, whatever stands before it."""
        plain = {number: mixer.module.forward for number, mixer in self.items()}
        for number, mixer in self.items():
            mixer.module.forward = _alone(plain[number])
        try:
            yield
        finally:
            for number, mixer in self.items():
                mixer.module.forward = plain[number]


@contextmanager
def _hooks(hooks: Iterable[Any]) -> Iterator[None]:
    made = [*hooks]
    try:
        yield
    finally:
        for hook in made:
            hook.remove()


def _alone(forward: Any) -> Callable[..., Any]:
    """In the place of a module's ``forward``: each token of a pass as a sequence of its own, without a cache."""

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() == 3:
            return value.transpose(0, 1)
        return {} if isinstance(value, dict) else None if isinstance(value, Cache) else value

    def together(output: Any) -> Any:
        return output.transpose(0, 1).contiguous() if isinstance(output, torch.Tensor) else output

    def call(*args: Any, **kwargs: Any) -> Any:
        output = _call(forward, signature(forward).bind(*args, **kwargs), change)
        return (together(output[0]), *output[1:]) if isinstance(output, tuple) else together(output)

    return call
