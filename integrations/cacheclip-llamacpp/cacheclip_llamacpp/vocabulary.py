"""llama.cpp's tokenizer: ids of a text with the characters that each covers, and text of ids."""

from __future__ import annotations

import ctypes
from collections.abc import Container, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cacheclip_rag import UnsupportedModelError
from cacheclip_rag.runtime import CALL_MARKERS, REASONING_MARKERS, TokenizedText, markers_among

from .library import library
from .weights import GgufWeights

_MARKERS = frozenset(CALL_MARKERS) | {marker for pair in REASONING_MARKERS for marker in pair}


class Vocabulary:
    """The vocabulary of one GGUF file.

    Raises:
        UnsupportedModelError: its tokens do not give back the text, so that their characters are not known.
    """

    def __init__(self, weights: GgufWeights) -> None:
        api = library()
        self._weights, self._pointer = weights, weights.vocabulary  # the first keeps the second
        kind = api.llama_vocab_type(self._pointer)
        if kind not in (api.LLAMA_VOCAB_TYPE_SPM, api.LLAMA_VOCAB_TYPE_BPE):
            raise UnsupportedModelError(
                f"model {weights.name!r} has a tokenizer of llama.cpp's kind {kind}, which changes texts, so that no "
                "chunk can be found in its tokens. Choose a model with a BPE or SentencePiece tokenizer."
            )
        self.size = int(api.llama_vocab_n_tokens(self._pointer))
        self._pieces: dict[int, bytes] = {}

    @property
    def opening(self) -> str:
        """The token that stands before any text, as text; empty if there is none."""
        api = library()
        return self.text_of(api.llama_vocab_bos(self._pointer)) if api.llama_vocab_get_add_bos(self._pointer) else ""

    @property
    def bos(self) -> str:
        """The token of a text's beginning, for chat templates; empty if there is none."""
        return self.text_of(library().llama_vocab_bos(self._pointer))

    @property
    def eos(self) -> str:
        """The token of a text's end, for chat templates."""
        return self.text_of(library().llama_vocab_eos(self._pointer))

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        is_end = library().llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self._pointer, token))

    @cached_property
    def control_ids(self) -> tuple[int, ...]:
        """Control tokens, ascending: those that the file calls so, ends, and markers among the tokens that its makers
        added. Other added tokens are text (Gemma's runs of line breaks, ``<table>``), unless the chat template writes
        them."""
        api, template = library(), self._weights.template or ""
        found = set(self.eos_ids)
        for token in range(self.size):
            kind = api.llama_vocab_get_attr(self._pointer, token)
            if kind & api.LLAMA_TOKEN_ATTR_CONTROL:
                found.add(token)
            elif kind & api.LLAMA_TOKEN_ATTR_USER_DEFINED:
                text = self.text_of(token)
                if not text.isspace() and (text in template or text in _MARKERS):
                    found.add(token)
        return tuple(sorted(found))

    @cached_property
    def markers(self) -> dict[int, str]:
        """Control tokens around calls of tools and reasoning, which :meth:`decode` leaves out."""
        return markers_among({token: self.text_of(token) for token in self.control_ids})

    def tokenize(self, text: str, *, control: bool) -> TokenizedText:
        """See :meth:`~cacheclip_rag.runtime.base.Runtime.tokenize`."""
        tokens = self._with_offsets(text, self._ids(text, control))
        if control:
            return tokens
        ids, offsets = tokens.columns
        inside = np.isin(ids, self.control_ids) & (offsets[:, 1] - offsets[:, 0] > 1)
        if not inside.any():
            return tokens
        # llama.cpp finds added tokens in any text: cut the name of one behind its first character
        cut = int(offsets[int(inside.argmax()), 0]) + 1
        parts = self.tokenize(text[:cut], control=False), self.tokenize(text[cut:], control=False).part(by=cut)
        return TokenizedText(parts[0].ids + parts[1].ids, parts[0].offsets + parts[1].offsets)

    def decode(self, ids: Sequence[int], *, keep: Container[int] = ()) -> str:
        """Text of ids, without control tokens but those to ``keep``."""
        kept = [token for token in ids if token in keep or token not in self._control]
        found = b"".join(map(self.piece, kept))
        if self._adds_space and found.startswith(b" "):
            found = found[1:]
        return found.decode(errors="replace")

    def piece(self, token: int) -> bytes:
        """The bytes of one token; of a control token, its name."""
        if token not in self._pieces:
            api, size = library(), 64
            while True:
                buffer = ctypes.create_string_buffer(size)
                length = api.llama_token_to_piece(self._pointer, token, buffer, size, 0, True)
                if length >= 0:
                    break
                size = -length
            self._pieces[token] = buffer.raw[:length]
        return self._pieces[token]

    def text_of(self, token: int) -> str:
        """The text of one token; empty for a number that is none."""
        return self.piece(token).decode(errors="replace") if 0 <= token < self.size else ""

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(self.control_ids)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a space is put before a text (SentencePiece)."""
        ids = self._ids("a", False)
        return b"".join(map(self.piece, ids)) == b" a"

    def _ids(self, text: str, control: bool) -> list[int]:
        api, data = library(), text.encode()
        size = len(data) + 16
        while True:
            buffer = (api.llama_token * size)()
            count = api.llama_tokenize(self._pointer, data, len(data), buffer, size, False, control)
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def _with_offsets(self, text: str, ids: Sequence[int]) -> TokenizedText:
        """The ids with the characters that they cover. A token that covers a part of a character covers all of it."""
        if not ids:
            return TokenizedText((), ())
        data, pieces = text.encode(), [self.piece(token) for token in ids]
        joined = b"".join(pieces)
        if joined == data:
            starts = np.cumsum([0, *map(len, pieces)])
            begin, end = starts[:-1], starts[1:]
        elif joined == b" " + data:
            starts = np.maximum(np.cumsum([0, *map(len, pieces)]) - 1, 0)
            begin, end = starts[:-1], starts[1:]
        else:
            begin, end = _found_in(data, pieces)
        if len(data) > len(text):
            number = np.cumsum((np.frombuffer(data, np.uint8) & 0xC0) != 0x80)  # of the character, from 1
            last = np.concatenate(([0], number))[end]
            first = np.concatenate((number, number[-1:] + 1))[begin] - 1
            begin, end = first, np.where(end > begin, last, first)
        return TokenizedText(tuple(ids), tuple(zip(begin.tolist(), end.tolist(), strict=True)))


def _found_in(data: bytes, pieces: Sequence[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Where each piece stands in a text that the tokenizer has changed. One that does not stand there covers nothing,
    so that no chunk is recognised in it."""
    begin, end, at = [], [], 0
    for piece in pieces:
        found = data.find(piece, at, at + len(piece) + 8) if piece else -1
        if found < 0 and piece.startswith(b" ") and len(piece) > 1:
            piece = piece[1:]
            found = data.find(piece, at, at + len(piece) + 8)
        begin.append(at if found < 0 else found)
        at = at if found < 0 else found + len(piece)
        end.append(at)
    return np.array(begin, np.int64), np.array(end, np.int64)
