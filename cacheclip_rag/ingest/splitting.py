"""Splits documents into passages by token count, at sentence and paragraph borders if possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base.errors import ConfigurationError, MissingExtraError
from ..prompt.segments import normalise_chunk

__all__ = ["Splitter"]


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits text into passages of at most ``chunk_tokens`` tokens of the given tokenizer."""

    tokenizer: Any
    """A transformers fast tokenizer. The primary's tokenizer makes sizes equal to tokens in the prompt."""
    chunk_tokens: int
    overlap_tokens: int = 0

    def __post_init__(self) -> None:
        check_sizes(self.chunk_tokens, self.overlap_tokens)

    def split(self, text: str, *, markdown: bool = False) -> list[str]:
        """Passages in order, stripped, none empty; Markdown is cut at its headings and blocks first."""
        try:
            from semantic_text_splitter import MarkdownSplitter, TextSplitter
        except ImportError as error:
            raise MissingExtraError("semantic-text-splitter", "ingest") from error
        cls = MarkdownSplitter if markdown else TextSplitter
        splitter = cls.from_huggingface_tokenizer(
            self.tokenizer.backend_tokenizer, self.chunk_tokens, overlap=self.overlap_tokens
        )
        return [passage for chunk in splitter.chunks(text) if (passage := normalise_chunk(chunk))]


def check_sizes(chunk_tokens: int, overlap_tokens: int) -> None:
    """Raise ConfigurationError unless ``chunk_tokens`` is at least 16 and larger than ``overlap_tokens``."""
    if chunk_tokens < 16 or not 0 <= overlap_tokens < chunk_tokens:
        raise ConfigurationError(
            "expected chunk size >= 16 tokens and 0 <= overlap < chunk size, got "
            f"chunk size {chunk_tokens}, overlap {overlap_tokens}."
        )
