"""The tokenizer for text of users and documents: a copy of the model's tokenizer that knows no control token.

Control tokens are special tokens, tokens that the config names (end of text, padding), tokens that the chat template
writes, and added tokens that are not in the base vocabulary (``<tool_call>``, ``<think>``). Transformers'
``split_special_tokens`` covers only the first kind, and is a switch on an object that all threads share. The copy has
no switch. Added tokens of the base vocabulary are text (Gemma's runs of line breaks, ``<table>``), and so is white
space: their ids stay.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from typing import Any


def text_tokenizer(tokenizer: Any, end_ids: Collection[int]) -> tuple[Any, frozenset[int]]:
    """A copy of a fast tokenizer that gives no control token for any text, and the ids of the control tokens. Added
    tokens among ``end_ids``, which end an answer, are control tokens."""
    from tokenizers import AddedToken, Tokenizer

    backend = tokenizer.backend_tokenizer
    added: dict[int, Any] = dict(sorted(backend.get_added_tokens_decoder().items()))
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    control = _control_ids(tokenizer, added, vocabulary, end_ids)
    unguessable = f"\ue000{secrets.token_hex(16)}-"
    own = Tokenizer(_without(backend, {added[number].content: number for number in control}, unguessable))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(own, part, getattr(backend, part))
    for number, token in added.items():
        if number not in control:
            own.add_tokens([token])
            assert own.token_to_id(token.content) == number, f"the added token {token.content!r} has changed its id"
        elif token.content not in vocabulary:  # ids outside the vocabulary are given by counting
            own.add_tokens([AddedToken(f"{unguessable}{number}", normalized=False)])
    twin = copy.copy(tokenizer)
    twin._tokenizer = own
    return twin, frozenset(control)


def _control_ids(
    tokenizer: Any, added: dict[int, Any], vocabulary: dict[str, int], end_ids: Collection[int]
) -> set[int]:
    named = {*tokenizer.all_special_ids, *end_ids}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    last = _last_trained(tokenizer.backend_tokenizer.model, added, vocabulary)
    control = set()
    for number, token in added.items():
        text = token.content
        is_base = text in vocabulary and number <= last
        if token.special or number in named or (not text.isspace() and (not is_base or text in template)):
            control.add(number)
    return control


def _last_trained(model: Any, added: Collection[int], vocabulary: dict[str, int]) -> int:
    """The last token that the model can make from text. Conversions from GGUF enter added tokens in the vocabulary
    too, after this one."""
    for text, number in sorted(vocabulary.items(), key=lambda item: -item[1]):
        if number not in added and [token.id for token in model.tokenize(text)] == [number]:
            return number
    return -1


def _without(backend: Any, control: dict[str, int], unguessable: str) -> Any:
    """The backend's model; if it would find control tokens in a text by itself, a model in which they have names that
    no text contains. Single characters and the token for unknown characters stay."""
    from tokenizers import Tokenizer

    findable = {
        text
        for text, number in control.items()
        if len(text) > 1 and number in [token.id for token in backend.model.tokenize(text)]
    }
    if not findable:
        return backend.model
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = []
    model = definition["model"]
    findable -= {model.get("unk_token")}
    if isinstance(model["vocab"], dict):
        names = {text: f"{unguessable}{control[text]}" for text in findable}
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    else:
        for number, (text, score) in enumerate(model["vocab"]):
            if text in findable and number != model.get("unk_id"):
                model["vocab"][number] = (f"{unguessable}{number}", score)
    if model.get("merges"):
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [(a, b) for a, b in pairs if not findable & {a, b, a + b.removeprefix(prefix)}]
    return Tokenizer.from_str(json.dumps(definition)).model


_KEEPING = ("ByteLevel", "Digits", "Punctuation", "Split", "Sequence")
"""Pre-tokenizers that drop no character, unless their behaviour is "Removed"."""


def control_names(tokenizer: Any, own: Any, control_ids: Collection[int]) -> re.Pattern[str] | None:
    """What stands in every text that holds the name of a control token: the first two characters of one. None: texts
    must not be cut for ``tokenizer`` or its copy for text."""
    if not (divides_at_spaces(tokenizer) and divides_at_spaces(own)):
        return None
    begin = {re.escape(name[:2]) for name in tokenizer.convert_ids_to_tokens([*control_ids])}
    return re.compile("|".join(sorted(begin)) or "(?!)")


@dataclass(frozen=True, slots=True)
class LeastTokens:
    """Least number of tokens of a text, without tokenising it: its bytes over the bytes of the longest token."""

    normalizer: Any
    longest: int
    """Bytes that one token covers at most."""
    dropped: bytes
    """Bytes for which the vocabulary has no token."""

    @classmethod
    def of(cls, tokenizer: Any) -> LeastTokens | None:
        """The bound for a text tokenizer; None if it would not be certain, as for all but byte-level BPE."""
        from tokenizers.models import BPE
        from tokenizers.normalizers import NFC

        backend = tokenizer.backend_tokenizer
        if not isinstance(backend.model, BPE) or not isinstance(backend.normalizer, NFC | None):
            return None
        added = list(backend.get_added_tokens_decoder().values())
        if not _keeps_all_bytes(backend.pre_tokenizer) or any(token.lstrip or token.rstrip for token in added):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        longest = max((*map(len, vocabulary), *(len(token.content.encode()) for token in added)))
        dropped = bytes(byte for byte, letter in enumerate(_byte_letters()) if letter not in vocabulary)
        return cls(backend.normalizer, longest, dropped)

    def __call__(self, text: str) -> int:
        if self.normalizer is not None and not text.isascii():
            text = self.normalizer.normalize_str(text)
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest)


def _keeps_all_bytes(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer is byte-level and passes on every byte of a text."""
    if pre_tokenizer is None:
        return False
    first = json.loads(pre_tokenizer.__getstate__())
    steps = [first, *first.get("pretokenizers", ())]
    keep = all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)
    return keep and any(step["type"] == "ByteLevel" for step in steps)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one token of a fast tokenizer, as they stand in the middle of a text; of an added token, its name."""

    backend: Any
    added: frozenset[int]
    is_byte_level: bool

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:
        """It asks the tokenizer once what a call for each token would copy each time: all added tokens."""
        backend = tokenizer.backend_tokenizer
        is_byte_level = backend.decoder is not None and b'"ByteLevel"' in backend.decoder.__getstate__()
        return cls(backend, frozenset(backend.get_added_tokens_decoder()), is_byte_level)

    def __call__(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is None:  # weights have more rows than the tokenizer has tokens
            return f"token_id:{token_id}".encode()
        if token_id in self.added:
            return str(piece).encode()
        if self.is_byte_level:
            return bytes(map(_BYTES.__getitem__, piece)) if _BYTES.keys() >= {*piece} else str(piece).encode()
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(byte[1])
        return str(piece).replace("\u2581", " ").encode()


def _byte_letters() -> list[str]:
    """The character by which byte-level tokenizers write each of the 256 bytes (from GPT-2)."""
    others = count(256)
    return [chr(n if 33 <= n <= 126 or (161 <= n <= 255 and n != 173) else next(others)) for n in range(256)]


_BYTES = {letter: byte for byte, letter in enumerate(_byte_letters())}


_LETTERS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
}
_KNOWN = {
    *_LETTERS,
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    *(r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}
"""Alternatives of the patterns of GPT-2, Llama 3, Qwen and GPT-OSS."""


def divides_at_spaces(tokenizer: Any) -> bool:
    """Whether a text that is cut before a space between a small letter and a letter has the tokens of both parts.

    Byte-level BPE first divides a text into words, by a pattern that is matched from the left. With the patterns of
    :data:`_KNOWN`, no word goes on from a small letter to the space behind it, and no match looks further there."""
    from tokenizers.models import BPE
    from tokenizers.normalizers import NFC

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE) or backend.model.dropout or not isinstance(backend.normalizer, NFC | None):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word or re.search("[a-z] ", token.content):
            return False
    if backend.pre_tokenizer is None:
        return False
    first = json.loads(backend.pre_tokenizer.__getstate__())
    divided = False
    for step in first.get("pretokenizers", [first]):
        if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            parts = {*re.split(r"\|(?![^(]*\))", step["pattern"].get("Regex", ""))}
            if not parts <= _KNOWN:
                return False
            divided |= bool(parts & _LETTERS)
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            divided |= step["use_regex"]
        elif step["type"] != "Digits":
            return False
    return divided
