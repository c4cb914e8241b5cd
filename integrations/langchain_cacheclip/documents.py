"""Documents on their way to the model: a transformer that precomputes them, and a chain that says which they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from cacheclip_rag.errors import ConfigurationError

from .base import ModelFields

__all__ = ["CacheClipDocumentTransformer", "create_cacheclip_documents_chain"]

_CONTENT = PromptTemplate.from_template("{page_content}")


class CacheClipDocumentTransformer(BaseDocumentTransformer):
    """Precomputes documents on their way into a store, and returns them unchanged.

    Put it behind the splitter: what is stored is each document's ``page_content`` as it is then. Deletions do not pass
    a transformer: :class:`CacheClipVectorStore` sees them, or call ``llm.engine.release_sources(ids)``.

    Args:
        llm: the model that will read them.
    """

    def __init__(self, llm: ModelFields) -> None:
        self.llm = llm

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Precompute those that hold text.

        Raises:
            PromptTooLongError: a document longer than the model's context.
        """
        for document in documents:
            if document.page_content.strip():
                self.llm.engine.precompute([document.page_content], source=document.id)
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The same in a worker thread."""
        return await asyncio.to_thread(self.transform_documents, documents, **kwargs)


def create_cacheclip_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """As ``create_stuff_documents_chain``, with the documents handed to the model beside the prompt: those that were
    never precomputed are stored after their first answer.

    Args:
        llm: a :class:`ChatCacheClip` or :class:`CacheClipLLM`, bound or configured as you like.
        prompt: with the variable ``document_variable_name``.
        output_parser: default a string.
        document_prompt: how a document is written; default its ``page_content``. What else it writes (a title, a
            page) is ordinary text around the chunk.

    Raises:
        ConfigurationError: a prompt without that variable.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigurationError(
            f"the prompt needs the variable {document_variable_name!r} for the documents, got "
            f"{prompt.input_variables}. Add it, or name another by document_variable_name."
        )
    writing = document_prompt or _CONTENT
    parser: BaseOutputParser[Any] = output_parser or StrOutputParser()

    def written(inputs: dict[str, Any]) -> str:
        return document_separator.join(format_document(each, writing) for each in inputs[document_variable_name])

    def asked(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        documents = list(inputs[document_variable_name])
        format_inputs = RunnablePassthrough.assign(**{document_variable_name: written})
        return format_inputs.with_config(run_name="format_inputs") | prompt | llm.bind(documents=documents) | parser

    return RunnableLambda(asked).with_config(run_name="cacheclip_documents_chain")
