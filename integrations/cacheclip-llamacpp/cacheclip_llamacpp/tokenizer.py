"""Chat template and token counts of a GGUF file, in the place of a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cacheclip_rag.runtime import render_chat_template

from .vocabulary import Vocabulary
from .weights import GgufWeights


class GgufTokenizer:
    """What :class:`~cacheclip_rag.plugins.ChatText` and the splitter of documents ask of a
    tokenizer."""

    def __init__(self, weights: GgufWeights, vocabulary: Vocabulary) -> None:
        self.chat_template = weights.template
        self._vocabulary = vocabulary
        self.eos_token_id = min(vocabulary.eos_ids, default=None)
        self.bos_token_id = None
        self._special = {"bos_token": vocabulary.bos, "eos_token": vocabulary.eos}

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._vocabulary.tokenize(text, control=False))

    # -- what llguidance asks for ---------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of every token."""
        return [self._vocabulary.piece(token) for token in range(self._vocabulary.size)]

    @property
    def special_token_ids(self) -> Sequence[int]:
        """Control tokens."""
        return self._vocabulary.control_ids

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        return list(self._vocabulary.tokenize(text, control=False).ids)

    # -- what transformers has ------------------------------------------------------------------------------------

    def get_chat_template(self, tools: Any = None) -> str:
        """The template, whether there are tools or not."""
        return self.chat_template or ""

    def apply_chat_template(self, messages: Any, *, tokenize: bool, **options: Any) -> str:
        """Messages as text."""
        assert not tokenize, "the text is tokenised as every prompt is"
        return render_chat_template(messages, **{**self._special, **options})
