"""Fills prompts with whole chunks: where a chunk is cut, some of its tokens are computed again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper

if TYPE_CHECKING:
    from typing import Self

    from llama_index.core.llms import LLM
    from llama_index.core.prompts import BasePromptTemplate
    from llama_index.llms.cacheclip import CacheClipLLM

logger = logging.getLogger("cacheclip_rag.llama_index")
"""Not ``__name__``: LlamaIndex gives its loggers, and all below them, a handler that prints nothing."""

_GLUE = "\n\n"
_REMEMBERED = 1024
_EMPTY_CHAT = ({"role": "system", "content": ""}, {"role": "user", "content": ""})


class WholeChunks(PromptHelper):
    """A prompt helper that puts as many whole chunks into a prompt as fit, counted by the model's tokenizer.

    A single chunk that is too long for a prompt is split by LlamaIndex.
    """

    _llm: Any = PrivateAttr(default=None)
    _counts: dict[str, int] = PrivateAttr(default_factory=dict)
    """Token counts of recent texts, because the same texts are counted again in an event loop."""

    @classmethod
    def class_name(cls) -> str:
        return "WholeChunks"

    @classmethod
    def of(cls, llm: CacheClipLLM) -> Self:
        """A helper for an LLM's context. The tokenizer is loaded when the first prompt is made."""
        helper = cls.from_llm_metadata(llm.metadata, tokenizer=lambda text: list(llm.engine.primary.tokenize(text).ids))
        assert isinstance(helper, cls)
        helper._llm = llm
        return helper

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """Chunks joined to one text per prompt, in order."""
        padding += self._template_tokens()
        room = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        packs: list[str] = []
        taken = 0
        for text in _stripped(text_chunks):
            tokens = self._tokens(text)
            if tokens > room:
                packs += super().repack(prompt, [text], padding, llm, tools)
                taken = room
            elif packs and taken + self._tokens(_GLUE) + tokens <= room:
                packs[-1] = f"{packs[-1]}{_GLUE}{text}"
                taken += self._tokens(_GLUE) + tokens
                self._counts[packs[-1]] = taken
            else:
                packs.append(text)
                taken = tokens
        return packs

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """The first chunks that fit into one prompt. If the first chunk does not fit, its beginning."""
        texts = _stripped(text_chunks)
        padding += self._template_tokens()
        room = self._get_available_chunk_size(prompt, padding=padding, llm=llm, tools=tools)
        kept: list[str] = []
        for text in texts:
            room -= self._tokens(text) + (self._tokens(_GLUE) if kept else 0)
            if room < 0:
                break
            kept.append(text)
        if not kept and texts:
            kept = super().truncate(prompt, texts[:1], padding, llm, tools)
        if len(kept) < len(texts):
            logger.warning(
                "%d of %d chunks do not fit into one prompt and are left out", len(texts) - len(kept), len(texts)
            )
        return kept

    def _template_tokens(self) -> int:
        """Tokens that the model's chat template puts around a prompt."""
        if self._llm is None or not self._llm.is_chat_model or not self._llm.engine.primary.has_chat_template:
            return 0
        return self._tokens(self._llm.engine.primary.render_chat(_EMPTY_CHAT))

    def count(self, texts: Sequence[str]) -> None:
        """Count the tokens of ``texts`` in advance."""
        for text in (*_stripped(texts), _GLUE):
            self._tokens(text)

    def _tokens(self, text: str) -> int:
        count = self._counts.get(text)
        if count is None:
            count = int(self._token_counter.get_string_tokens(text))
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()  # counts of other threads may be lost; they are then counted again
            self._counts[text] = count
        return count


def _stripped(texts: Sequence[str]) -> list[str]:
    return [text.strip() for text in texts if text.strip()]
