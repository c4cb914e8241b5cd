"""Answers that follow a JSON schema: a mask over the vocabulary before each token, from llguidance.

llguidance (MIT, no dependencies) compiles the schema in 2 ms and then lazily. With 49,152 tokens on one CPU core, a
mask takes 0.04 ms (median), and 0.16 ms until it is applied. xgrammar's masks take 0.002 ms after 6 ms of compiling,
but it needs Triton and an FFI library, and either is little beside a decoded token.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ...base.errors import ConfigurationError, MissingExtraError, ModelError, is_panic

_WRITING = {"whitespace_flexible": True, "whitespace_pattern": r"[ ]{1,2}|[ ]?\n[ \t]{0,24}"}
"""White space where JSON may hold it: a space or two, or a line's end and its indentation. Models write lists over
several lines, and do not end them on one. Without a limit, a model could write white space for ever."""


class Grammars:
    """Makes constraints for one tokenizer. Preparing its vocabulary takes about half a second, once."""

    def __init__(self, tokenizer: Any, eos_ids: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._name = name
        self._lock = threading.Lock()

    def constraint(self, json_schema: str) -> SchemaConstraint:
        """A constraint for one answer. Raises ConfigurationError: the schema is not supported, or the tokenizer has no
        vocabulary of its own; MissingExtraError: llguidance is not installed."""
        try:
            import llguidance  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("llguidance, which json_schema needs,", "structured") from error
        with self._lock:
            vocabulary = self._vocabulary
        matcher, why = _compiled(vocabulary, json_schema)
        if matcher is None:
            raise ConfigurationError(_refusal(vocabulary, json_schema, why))
        return SchemaConstraint(matcher)

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        if hasattr(self._tokenizer, "special_token_ids"):  # it is no tokenizer of transformers
            return LLTokenizer(TokenizerWrapper(self._tokenizer), eos_token=self._eos_ids)
        backend = copy.deepcopy(getattr(self._tokenizer, "backend_tokenizer", None))
        if backend is None:
            raise ConfigurationError(
                f"the tokenizer of model {self._name!r} is not a fast one, so its answers cannot follow a json_schema."
            )
        if not self._eos_ids:
            raise ConfigurationError(
                f"model {self._name!r} has no token that ends a turn, so its answers cannot follow a json_schema: JSON "
                "would never end. Set eos_token_id in its generation_config.json."
            )
        backend.no_padding()
        backend.no_truncation()
        return LLTokenizer(backend.to_str(), eos_token=self._eos_ids)


def _compiled(vocabulary: Any, json_schema: str) -> tuple[Any, str]:
    """What follows a schema, or None and why there is nothing."""
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(closed(stated(json.loads(json_schema))), defaults=_WRITING)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # references that only lead to themselves show here
        why = matcher.get_error()
    except BaseException as error:
        if not (isinstance(error, ValueError | RecursionError | OverflowError) or is_panic(error)):
            raise
        why = str(error) or type(error).__name__
    return (None, why) if why else (matcher, "")


def _refusal(vocabulary: Any, json_schema: str, why: str) -> str:
    """Why a schema cannot be followed, with the innermost part of it that is refused by itself, too."""
    path, tried = "", 0
    part = json.loads(json_schema)
    shared = {name: part[name] for name in _SHARED if name in part}
    ahead = _parts_of(part)
    while (ahead_of := next(ahead, None)) is not None and (tried := tried + 1) <= _MOST_TRIED:
        step, each = ahead_of
        matcher, own = _compiled(vocabulary, json.dumps({**shared, **each}))
        if matcher is None:
            path, part, why, ahead = f"{path}/{step}", each, own, _parts_of(each)
    what = " ".join(line.strip() for line in why.partition("<state>")[0].splitlines())[:500]
    if "NoExtensionBias" in what:
        what = "no value can follow it, because it refers to itself alone, or its parts exclude one another"
    where = f"at {path[1:]!r} ({json.dumps(part, ensure_ascii=False)[:200]})" if path else "as a whole"
    return f"json_schema cannot be followed {where}: {what}. Change this part of it."


def _parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that a schema names, each with its place; those that others refer to first."""
    for key, value in sorted(schema.items(), key=lambda item: item[0] not in _SHARED):
        named = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        if key in _OF_VALUES:
            continue
        if isinstance(value, dict) and key not in _OF_SCHEMAS:
            yield key, value
        else:
            yield from ((f"{key}/{name}", each) for name, each in named if isinstance(each, dict))


def stated(schema: Any) -> Any:
    """The schema without its keys that are null, which is how typed clients leave them out."""
    if isinstance(schema, list):
        return [stated(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: each if key in _OF_VALUES else stated(each)
        for key, each in schema.items()
        if each is not None or key in _OF_VALUES - {"enum", "examples"}
    }


def closed(schema: Any) -> Any:
    """The schema without further properties in objects that name some, unless it says something about them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: each if key in _NOT_CLOSED else closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OPENING & schema.keys():
        own["additionalProperties"] = False
    return own


_OF_VALUES = frozenset({"enum", "const", "default", "examples"})
_NOT_CLOSED = _OF_VALUES | {"allOf"}
"""Parts of one object, of which each may name properties of its own; and values that are no schemas."""
_SHARED = ("$defs", "definitions")
_OF_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", *_SHARED})
"""Keys whose values are schemas by name."""
_MOST_TRIED = 200
"""Parts of a schema that are compiled to find the one that is refused."""
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
        allowed_bits = np.unpackbits(bits, bitorder="little", count=min(len(logits), 8 * len(bits)))
        mask[: len(allowed_bits)] = allowed_bits
        return logits.masked_fill(~torch.from_numpy(mask).to(logits.device), float("-inf"))

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ModelError(
                f"the answer can no longer follow its json_schema: {self._matcher.get_error().splitlines()[0]}."
            )
