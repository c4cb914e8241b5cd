"""Tokenizer, chat template and end-of-turn tokens of a model, with or without reuse."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from itertools import groupby, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.clock import PhaseClock
from ...base.errors import CacheClipError, ConfigurationError, ModelError, first_line, is_panic
from ..base import PromptText, Runtime, StoredTokens, TokenizedText
from ..markers import known_reasoning, markers_among
from .chat_template import CHARACTERS, counted, variables_of, weight
from .constraint import Grammars, SchemaConstraint
from .user_text import LeastTokens, TokenBytes, control_names, text_tokenizer

_MOST_STEPS, _MOST_STEPS_OF_EACH = 300_000, 1_000
"""Of a chat template, and more for each message and tool: loops over messages in a loop over messages are usual."""
_MOST_TEMPLATE_S, _MOST_S_OF_EACH = 2.0, 0.005
"""Seconds of the processor, for templates whose steps are long."""
_BETWEEN_LOOKS = 16
"""Steps after which the clock is looked at."""
_left: ContextVar[list[float]] = ContextVar("left")
"""Steps that the rendering of a template may still take, and the time of the processor at which it must have ended."""


_CUTS = re.compile("[a-z]( )[A-Za-z].*[a-z]( )[A-Za-z]", re.DOTALL)
"""The first and the last space of a text before which it may be cut (:func:`~.user_text.divides_at_spaces`)."""
_SHORTEST = [{"role": "user", "content": "a"}]
_PROBE = "It was built in 1847."


class _EndlessTemplate(Exception):
    """A chat template takes more steps, or more time, than any chat needs."""


def template_step(value: Any, steps: int = 0) -> Any:
    """Count steps of the template that is being rendered, and those that it takes to write a value
    (:func:`~.chat_template.counted`). Returns the value."""
    left = _left.get()
    if isinstance(value, str):
        steps += len(value) // CHARACTERS
    elif isinstance(value, list | tuple | dict):
        steps += weight(value) // CHARACTERS
    left[0] -= steps
    if left[0] < 0 or (left[0] % _BETWEEN_LOOKS < steps and time.thread_time() > left[1]):
        raise _EndlessTemplate
    return value


def check_encodable(text: str) -> None:
    """Raise ConfigurationError if the text holds lone surrogates (half characters): tokenizers fail on them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"the text holds half a character ({text[error.start]!r} at {error.start}), which cannot be written as "
            "UTF-8. Read its source with errors='replace', or remove it."
        ) from error


def check_process(name: str, loaded_in: int) -> None:
    """Raise ModelError in a process that was forked after model ``name`` was loaded in process ``loaded_in``, if torch
    computes with several threads: they do not exist in the new process, and a pass would wait for them forever."""
    process, threads = os.getpid(), torch.get_num_threads()
    if process != loaded_in and threads > 1:
        raise ModelError(
            f"model {name!r} was loaded in process {loaded_in}, and process {process} was forked from it. Torch "
            f"computes with {threads} threads, which a fork does not have: a pass would never end. Load the model "
            "after the fork (gunicorn without --preload), start worker processes with 'spawn', or set "
            "OMP_NUM_THREADS=1."
        )


class ChatText(Runtime):
    """Renders messages by the chat template of :attr:`tokenizer`, which may be no tokenizer of transformers, but has
    its ``chat_template``, ``get_chat_template`` and ``apply_chat_template``."""

    wants_parts = False
    """Whether the template reads lists of parts and leaves out texts, as some of multimodal models do."""

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def template_variables(self) -> frozenset[str]:  # type: ignore[override]
        template = getattr(self.tokenizer, "chat_template", None) or {}
        return variables_of(template.values() if isinstance(template, dict) else [template])

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Messages rendered by the chat template. ``date`` is used by templates that state the date (default today)."""
        definitions = list(tools) or None
        template = self.tokenizer.get_chat_template(tools=definitions)
        if date is not None:  # transformers gives templates this function; a macro of the same name replaces it
            template = f"{{% macro strftime_now(format) %}}{date}{{% endmacro %}}{template}"
        count = len(messages) + len(tools)
        until = time.thread_time() + _MOST_TEMPLATE_S + _MOST_S_OF_EACH * count
        token = _left.set([_MOST_STEPS + _MOST_STEPS_OF_EACH * count, until])
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_in_parts(message) for message in messages] if self.wants_parts else list(messages),
                    tokenize=False,
                    add_generation_prompt=True,
                    chat_template=counted(template, f"{__name__}.{template_step.__name__}"),
                    tools=definitions,
                    **{"lipsum": None, **variables},  # a function of jinja's that writes without end
                )
            )
        except (MemoryError, CacheClipError):
            raise
        except (_EndlessTemplate, RecursionError):
            stopped = (
                f"the chat template of {self.name!r} was stopped: it took far more steps, or wrote far more, than a "
                f"chat of {len(messages)} messages needs. "
            )
            if messages != _SHORTEST and self._renders_shortest():
                raise ConfigurationError(f"{stopped}Shorten the messages, or take out what it repeats.") from None
            raise ModelError(
                f"{stopped}Expected a template without loops over long ranges. Take the one of the model's publisher."
            ) from None
        except Exception as error:  # a template raises for unknown roles or orders; a damaged one raises anything
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise ConfigurationError(
                f"the model's chat template refuses messages of roles {roles}: {error or type(error).__name__}. Change "
                "roles or order, or pass the prompt as one string."
            ) from error
        finally:
            _left.reset(token)

    def _renders_shortest(self) -> bool:
        """Whether the template is not stopped for one short message, which is to say that messages let it run on."""
        try:
            self.render_chat(_SHORTEST)
        except ModelError:
            return False
        except ConfigurationError:  # it wants other roles
            return True
        return True


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _writes_text(model: ChatText) -> bool:
    return _PROBE in model.render_chat([{"role": "user", "content": _PROBE}])


class _Text(NamedTuple):
    """What is left of a part of a prompt's text."""

    text: str
    control: bool


class TextModel(ChatText):
    """Base of the transformers runtimes: tokenizer, chat template, end-of-turn tokens."""

    can_constrain = True
    _fuse: Callable[..., Any] | None = None
    """Carries out plans; None: it is never asked to."""

    def __init__(self, model: Any, tokenizer: Any, name: str, like: TextModel | None = None) -> None:
        """``like``: one with the same tokenizer, which is not read again; all tokens are ordinary ones then."""
        if like is not None:
            vars(self).update({**vars(like), "_model": model.eval(), "control_ids": [], "eos_ids": frozenset()})
            return
        self._model = model.eval()
        self._process = os.getpid()
        self.tokenizer = tokenizer
        self.name = name
        self.eos_ids: frozenset[int] = eos_ids_of(model, tokenizer)
        self.text_tokenizer, control = text_tokenizer(tokenizer, self.eos_ids)
        """Tokenizer of text that users and documents wrote."""
        self.control_ids = sorted(control)
        self._control_names = control_names(tokenizer, self.text_tokenizer, self.control_ids)
        template, added = getattr(tokenizer, "chat_template", None), tokenizer.added_tokens_decoder
        self._call_markers = markers_among({number: token.content for number, token in added.items() if token.special})
        """Special tokens that mark calls of tools and reasoning."""
        self.marks_reasoning, self.reasoning_ends = known_reasoning(template, self._call_markers)

    @property
    def model(self) -> Any:
        """The transformers model. Every pass gets it here, so a pass that would hang is refused here."""
        check_process(self.name, self._process)
        return self._model

    def fuse(self, plan: Any, kv_sources: Any, *, capacity: int, clock: PhaseClock, slices: Any = None) -> Any:
        assert self._fuse is not None, "this runtime was made without a function that fuses"
        return self._fuse(self, plan, kv_sources, capacity=capacity, clock=clock, slices=slices)

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        """Token ids of ``text``, with no special tokens added.

        ``control`` is False for anything that a user or a document wrote. The name of a control token such as
        ``<|im_end|>`` or ``<tool_call>`` then stays ordinary text, so that a document cannot close its turn.
        """
        check_encodable(text)
        try:
            encoded = (self.tokenizer if control else self.text_tokenizer)(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except BaseException as error:
            if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic(error)):
                raise
            raise ModelError(
                f"the tokenizer of model {self.name!r} fails on a text of {len(text)} characters "
                f"({type(error).__name__}: {first_line(error)}). Fetch tokenizer.json and tokenizer_config.json again."
            ) from error
        return TokenizedText(encoded["input_ids"], encoded["offset_mapping"])

    def tokenize_prompt(self, segments: Sequence[PromptText], stored: Sequence[StoredTokens] = ()) -> TokenizedText:
        """As the base's. Of stored texts only both ends are tokenised, as far as a space where a text may be cut; what
        is left without their middles is cut at such spaces, too."""
        left, middles, cuts, moved, begin = list[_Text](), list[tuple[Any, Any]](), list[int](), [0], 0
        for each, known in zip_longest(segments, stored):
            text, names = each.text, self._control_names
            is_cut = None if known is None or names is None or each.control else _CUTS.search(text)
            if known and names and is_cut and not names.search(unicodedata.normalize("NFC", text)):
                tokens, at = known
                first, last = is_cut.start(1), is_cut.start(2)
                ids, offsets = tokens.columns
                own = slice(*np.searchsorted(offsets[:, 1], (at + first, at + last), side="right"))
                middles.append((ids[own], offsets[own] + (begin - at)))
                cuts.append(begin + first - moved[-1])
                moved.append(moved[-1] + last - first)
                text = text[:first] + text[last:]
            left.append(_Text(text, each.control))
            begin += len(each.text)
        tokens = super().tokenize_prompt(left)
        ids, offsets = tokens.columns
        places, both = np.searchsorted(offsets[:, 1], cuts, side="right").tolist(), list[tuple[Any, Any]]()
        for number, (start, stop) in enumerate(zip([0, *places], [*places, len(ids)], strict=True)):
            both += [(ids[start:stop], offsets[start:stop] + moved[number]), *middles[number : number + 1]]
        return TokenizedText(*map(np.concatenate, zip(*both, strict=True)))

    def check(self) -> None:
        """Use once what damaged files spoil. Raises whatever the libraries raise."""
        tokens = self.tokenize(_PROBE)
        if not tokens.ids or not self.decode_ids(tokens.ids) or max(tokens.ids) >= self._model.config.vocab_size:
            raise ModelError(
                f"expected the tokenizer of model {self.name!r} to write {_PROBE!r} as tokens below "
                f"{self._model.config.vocab_size}, got {tokens.ids}. Fetch tokenizer.json and config.json again."
            )
        assert isinstance(self.opening, str)
        with contextlib.suppress(ConfigurationError):  # it wants other roles
            self.wants_parts = self.has_chat_template and not _writes_text(self)
            if self.wants_parts and not _writes_text(self):
                raise ModelError(
                    f"the chat template of {self.name!r} leaves out what a user's message says. Expected one that "
                    "writes text, or a list of parts. Take the one of the model's publisher."
                )

    def least_tokens(self, text: str) -> int:
        return self._least_tokens(text) if self._least_tokens is not None else 0

    @cached_property
    def _least_tokens(self) -> LeastTokens | None:
        return LeastTokens.of(self.text_tokenizer)

    @cached_property
    def opening(self) -> str:  # type: ignore[override]
        """Special tokens that the tokenizer puts before any text, as a string: usually one BOS token, or nothing."""
        ids = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        leading: list[int] = next((ids[:n] for n in range(len(ids)) if ids[n : n + len(plain)] == plain), [])
        return "".join(self.tokenizer.convert_ids_to_tokens(leading))

    @cached_property
    def tokenizer_sha256(self) -> str:  # type: ignore[override]
        """SHA-256 of the tokenizer and its chat template."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        definition = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        template = getattr(self.tokenizer, "chat_template", None)
        return hashlib.sha256(f"{definition}\0{template}".encode("utf-8", "surrogatepass")).hexdigest()

    def decode_ids(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes.of(self.tokenizer)

    def decode_calls(self, ids: Sequence[int]) -> str:
        markers = self._call_markers
        if not markers:
            return self.decode_ids(ids)
        runs = groupby(ids, key=lambda token: markers.get(token))
        return "".join(marker * len(list(run)) if marker else self.decode_ids(list(run)) for marker, run in runs)

    def constrain(self, json_schema: str) -> SchemaConstraint:
        return self._grammars.constraint(json_schema)

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.eos_ids, self.name)


def eos_ids_of(model: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-text and end-of-turn tokens. GGUF conversions often record only one of the two."""
    ids: set[int] = set()
    for owner in (model.generation_config, model.config, tokenizer):
        source = getattr(owner, "eos_token_id", None)
        ids.update([source] if isinstance(source, int) else source or [])
    for token in ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<|return|>", "<|call|>"):
        token_id = tokenizer.convert_tokens_to_ids(token)
        if isinstance(token_id, int) and token_id != tokenizer.unk_token_id:
            ids.add(token_id)
    return frozenset(ids)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars off unless stderr is a terminal."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    bar = gguf.tqdm  # transformers' own switch does not turn this bar off
    transformers_logging.disable_progress_bar()
    gguf.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.tqdm = bar
        transformers_logging.enable_progress_bar()
