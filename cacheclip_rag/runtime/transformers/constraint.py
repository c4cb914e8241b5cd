"""Answers that follow a JSON schema: a mask over the vocabulary before each token, from llguidance.

llguidance (MIT, no dependencies) compiles the schema in 2 ms and then lazily. With 49,152 tokens on one CPU core, a
mask takes 0.04 ms (median), and 0.16 ms until it is applied. xgrammar's masks take 0.002 ms after 6 ms of compiling,
but it needs Triton and an FFI library, and either is little beside a decoded token.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...base.errors import ConfigurationError, MissingExtraError, ModelError, is_panic

__all__ = ["Grammars", "SchemaConstraint", "closed"]

_WRITING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and chat templates write it, on one line: a model could write white space without end."""


class Grammars:
    """Makes constraints for one tokenizer. Preparing its vocabulary takes about half a second, once."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._name = name
        self._lock = threading.Lock()

    def constraint(self, json_schema: str) -> SchemaConstraint:
        """A constraint for one answer.

        Raises:
            ConfigurationError: the schema is not supported, or the tokenizer has no vocabulary of its own.
            MissingExtraError: llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingExtraError("llguidance, which json_schema needs,", "structured") from error
        with self._lock:
            vocabulary = self._vocabulary
        try:
            grammar = LLMatcher.grammar_from_json_schema(closed(json.loads(json_schema)), defaults=_WRITING)
            matcher = LLMatcher(vocabulary, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # references that only lead to themselves show here
            why = matcher.get_error()
        except BaseException as error:
            if not (isinstance(error, ValueError | RecursionError | OverflowError) or is_panic(error)):
                raise
            why = str(error)
        if why:
            raise ConfigurationError(f"json_schema cannot be followed: {why.splitlines()[0]}. Change this part of it.")
        return SchemaConstraint(matcher)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        backend = copy.deepcopy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ConfigurationError(
                f"the tokenizer of model {self._name!r} is not a fast one, so its answers cannot follow a json_schema."
            )
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(backend.to_str(), eos_token=self._eos_ids)


def closed(schema: Any) -> Any:
    """The schema without further properties in objects that name some, unless it says something about them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: each if key in _NOT_CLOSED else closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OPENING & schema.keys():
        found["additionalProperties"] = False
    return found


_NOT_CLOSED = frozenset({"allOf", "enum", "const", "default", "examples"})
"""Parts of one object, of which each may name properties of its own; and values that are no schemas."""
_OPENING = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "$ref"})


class SchemaConstraint:
    """Follows one answer. Its end is allowed only where the schema is fulfilled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """``(vocab_size,)`` logits with those of tokens that must not come next at minus infinity."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros(len(logits), np.bool_)
        found = np.unpackbits(bits, bitorder="little", count=min(len(logits), 8 * len(bits)))
        mask[: len(found)] = found
        return logits.masked_fill(~torch.from_numpy(mask).to(logits.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        """Take the chosen token into account."""
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ModelError(
                f"the answer can no longer follow its json_schema: {self._matcher.get_error().splitlines()[0]}."
            )
