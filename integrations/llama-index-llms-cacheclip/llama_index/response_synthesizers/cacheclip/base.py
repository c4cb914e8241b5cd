"""The synthesizer: wraps LlamaIndex's synthesizers, passes nodes to the model, and keeps chunks whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, get_response_synthesizer
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryType
from llama_index.core.settings import Settings
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index.llms.cacheclip import CacheClipLLM

from cacheclip_rag import ConfigurationError

from .packing import WholeChunks

dispatcher = get_dispatcher(__name__)

_NODES = "cacheclip_nodes"
"""Keyword that passes nodes through the base class. The name ``nodes`` is used by the base class's span."""
_WITHOUT_LLM = {ResponseMode.NO_TEXT: NoText, ResponseMode.CONTEXT_ONLY: ContextOnly}


class CacheClipSynthesizer(BaseSynthesizer):
    """LlamaIndex's response modes with chunk caches.

    It adds to LlamaIndex's synthesizers: Nodes that were never precomputed are stored after their first answer, and
    released when they are deleted. Prompts are filled with whole chunks, counted by the model's tokenizer, so that no
    chunk is cut at the end of the context. ``simple_summarize`` joins chunks as the other modes do (LlamaIndex pastes a
    Python list). :class:`CacheClipFusionEvent` names the nodes of each prompt.
    Templates, ``update_prompts``, streaming, async, ``output_cls`` and events work as in LlamaIndex. With a structured
    LLM (``llm.as_structured_llm(...)``) or ``output_cls``, stored chunks are found in the prompt's text.

    Args:
        llm: a :class:`CacheClipLLM`, or a structured LLM over one; default ``Settings.llm``.
        response_mode: ``compact`` (default), ``refine``, ``tree_summarize``, ``simple_summarize``, ``accumulate``,
            ``compact_accumulate``, ``generation``, ``no_text`` or ``context_only``.
        prompt_helper: fills prompts with chunks; default: whole chunks, by the LLM's context and tokenizer.
        templates: ``text_qa_template``, ``refine_template``, ``summary_template``, ``simple_template``, and other
            arguments of ``get_response_synthesizer``.

    Raises:
        ConfigurationError: the LLM is not a :class:`CacheClipLLM`.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        response_mode: ResponseMode | str = ResponseMode.COMPACT,
        *,
        callback_manager: CallbackManager | None = None,
        prompt_helper: Any = None,
        streaming: bool = False,
        use_async: bool = False,
        output_cls: type[BaseModel] | None = None,
        **templates: Any,
    ) -> None:
        llm = llm or Settings.llm
        if not isinstance(_own(llm), CacheClipLLM):
            raise ConfigurationError(
                f"CacheClipSynthesizer needs a CacheClipLLM, got {type(llm).__name__}. Pass one as llm, or set "
                "Settings.llm; for other models use LlamaIndex's own synthesizers."
            )
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            prompt_helper=prompt_helper or WholeChunks.of(_own(llm)),
            streaming=streaming,
            output_cls=output_cls,
        )
        self._mode = ResponseMode(response_mode)
        self._options = {"use_async": use_async, **templates}
        self._prompts_from = self._stock(llm)

    # -- templates ----------------------------------------------------------------------------------------------

    def _get_prompts(self) -> PromptDictType:
        return self._prompts_from._get_prompts()

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._prompts_from._update_prompts(prompts)

    # -- LlamaIndex's calls -------------------------------------------------------------------------------------

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        return super().synthesize(query, nodes, additional_source_nodes, **{**response_kwargs, _NODES: nodes})

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        return await super().asynthesize(query, nodes, additional_source_nodes, **{**response_kwargs, _NODES: nodes})

    @dispatcher.span
    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        cacheclip_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        llm = self._knowing(query_str, text_chunks, cacheclip_nodes)
        if self._mode is ResponseMode.SIMPLE_SUMMARIZE:
            ask = llm.stream if self._streaming else llm.predict
            return ask(**self._summary(query_str, text_chunks, llm), **response_kwargs) or self._empty_response
        return self._stock(llm).get_response(query_str=query_str, text_chunks=text_chunks, **response_kwargs)

    @dispatcher.span
    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        cacheclip_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        llm = self._knowing(query_str, text_chunks, cacheclip_nodes)
        if self._mode not in _WITHOUT_LLM:
            await asyncio.to_thread(self._prepare, text_chunks)
        if self._mode is ResponseMode.SIMPLE_SUMMARIZE:
            ask = llm.astream if self._streaming else llm.apredict
            return await ask(**self._summary(query_str, text_chunks, llm), **response_kwargs) or self._empty_response
        return await self._stock(llm).aget_response(query_str=query_str, text_chunks=text_chunks, **response_kwargs)

    def _prepare(self, text_chunks: Sequence[str]) -> None:
        """Load weights and count tokens of the chunks, in a thread other than the event loop's."""
        assert _own(self._llm).engine.primary
        if isinstance(self._prompt_helper, WholeChunks):
            self._prompt_helper.count(text_chunks)

    # -- stock parts --------------------------------------------------------------------------------------------

    def _knowing(self, question: str, text_chunks: Sequence[str], nodes: Sequence[NodeWithScore] | None) -> LLM:
        """The LLM with the question and the nodes of its prompts; unchanged if it is not a CacheClipLLM."""
        if not isinstance(self._llm, CacheClipLLM):
            return self._llm
        known: dict[str, list[tuple[str, str]]] = {text: [] for text in text_chunks if text.strip()}
        for each in nodes or ():
            text = each.node.get_content(metadata_mode=MetadataMode.LLM)
            if text in known:
                known[text].append((each.node.node_id, each.node.ref_doc_id or ""))
        return self._llm.with_nodes(known, question=question)

    def _stock(self, llm: LLM) -> BaseSynthesizer:
        """LlamaIndex's synthesizer of this mode, with the current templates."""
        if self._mode in _WITHOUT_LLM:  # LlamaIndex would pass no LLM, and then use Settings.llm
            return _WITHOUT_LLM[self._mode](llm=llm, callback_manager=self._callback_manager, streaming=self._streaming)
        prompts = self._prompts_from._get_prompts() if hasattr(self, "_prompts_from") else {}
        return get_response_synthesizer(
            llm=llm,
            prompt_helper=self._prompt_helper,
            callback_manager=self._callback_manager,
            response_mode=self._mode,
            streaming=self._streaming,
            output_cls=self._output_cls,
            **{**self._options, **prompts},
        )

    def _summary(self, query_str: str, text_chunks: Sequence[str], llm: LLM) -> dict[str, Any]:
        """Arguments of ``simple_summarize`` with joined chunks; LlamaIndex would paste a Python list."""
        template: BasePromptTemplate = self._get_prompts()["text_qa_template"].partial_format(query_str=query_str)
        texts = self._prompt_helper.truncate(template, text_chunks, llm=llm)
        return {"prompt": template, "context_str": "\n\n".join(texts)}


def _own(llm: LLM) -> Any:
    """The LLM that answers; for a structured LLM, the LLM inside it."""
    return llm.llm if isinstance(llm, StructuredLLM) else llm
