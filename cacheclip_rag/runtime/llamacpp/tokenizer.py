"""Chat template, token counts and grammars of a GGUF file, in the place of a tokenizer of transformers."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

from ..transformers.constraint import Grammars
from .library import library
from .vocabulary import Vocabulary
from .weights import GgufWeights

__all__ = ["GgufGrammars", "GgufTokenizer"]


class GgufTokenizer:
    """What :class:`~cacheclip_rag.runtime.transformers.text.ChatText` and the splitter of documents ask of a
    tokenizer."""

    def __init__(self, weights: GgufWeights, vocabulary: Vocabulary) -> None:
        self.chat_template = weights.template
        self._vocabulary = vocabulary
        self._special = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos}

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._vocabulary.tokenize(text, control=False))

    def get_chat_template(self, tools: Any = None) -> str:
        """The template, whether there are tools or not."""
        return self.chat_template or ""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **options: Any) -> str:
        """Messages as text."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize, "the text is tokenised as every prompt is"
        rendered, _ = render_jinja_template([messages], **{**self._special, **options})
        return str(rendered[0])


class GgufGrammars(Grammars):
    """Constraints on llama.cpp's own vocabulary."""

    def __init__(self, weights: GgufWeights, vocabulary: Vocabulary) -> None:
        super().__init__(None, vocabulary.eos_ids, weights.name)
        self._weights, self._pieces = weights, vocabulary

    @cached_property
    def vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        # llguidance takes a first byte of 255, which no text has, for a control token's mark
        control = self._pieces.control_ids
        marks = {token: b"\xff" + self._pieces.piece(token) for token in control}
        return LLTokenizer.from_llamacpp(
            tokens=[marks.get(token) or self._pieces.piece(token) for token in range(self._pieces.size)],
            vocab_ptr=self._weights.vocabulary,
            tokenize_fptr=ctypes.cast(library().llama_tokenize, ctypes.c_void_p).value,
            eos_token=self._eos_ids,
        )
