"""A document transformer that precomputes documents, and a chain that passes documents to the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import (
    Runnable,
    RunnableLambda,
    RunnablePassthrough,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives, RunnableConfigurableFields

from cacheclip_rag import ConfigurationError

from .base import LangChainFields, origin

_CONTENT = PromptTemplate.from_template("{page_content}")


class CacheClipDocumentTransformer(BaseDocumentTransformer):
    """Precomputes documents on their way into a store, and returns them unchanged.

    Put it after the splitter: it stores each document's ``page_content``, with the chunk context of the model's method.
    A transformer does not see deletions: call ``llm.engine.release(sources=names)``. A name is the ``source`` in the
    documents' metadata, or the id of a single document (splitters give no ids). A :class:`CacheClipVectorStore`
    precomputes and releases documents itself and does not need this transformer.

    Args:
        llm: the model that will read the documents.
    """

    def __init__(self, llm: LangChainFields) -> None:
        self.llm = llm

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Precompute documents that are not blank. A document that cannot be stored, because it is longer than the
        model's context or holds half a character, is skipped with a warning that has its id."""
        self.llm._precompute(map(_named, documents))
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Like :meth:`transform_documents`, in a separate thread. A cancelled call stops at the next batch
        of documents."""
        await self.llm._aprecompute(map(_named, documents))
        return documents


def _named(document: Document) -> Document:
    """A document with an id: its own, else the ``source`` in its metadata."""
    source, whole = origin(document)
    return document if source or not whole else document.model_copy(update={"id": whole})


def create_cacheclip_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[Any] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
    question_variable_name: str = "input",
) -> Runnable[dict[str, Any], Any]:
    """Like ``create_stuff_documents_chain``, but also passes the documents to the model. Documents that were never
    precomputed are stored after their first answer.

    Args:
        llm: a :class:`ChatCacheClip` or :class:`CacheClipLLM`, also bound, configured or with fallbacks. Fallback
            models of other kinds get the prompt only.
        prompt: must have the variable ``document_variable_name``.
        output_parser: default: parse to a string.
        document_prompt: template of one document; default its ``page_content``. Other text in the template (a title, a
            page) is ordinary text around the chunk.
        question_variable_name: input with the user's question, which scores the chunks. If it is missing, all text
            after the documents scores them.

    Raises:
        ConfigurationError: the prompt lacks the variable ``document_variable_name``.
    """
    if document_variable_name not in prompt.input_variables:
        raise ConfigurationError(
            f"the prompt needs the variable {document_variable_name!r} for the documents, got "
            f"{prompt.input_variables}. Add it, or name another variable with document_variable_name."
        )
    writing = document_prompt or _CONTENT
    parser: BaseOutputParser[Any] = output_parser or StrOutputParser()

    def written(inputs: dict[str, Any]) -> str:
        return document_separator.join(format_document(each, writing) for each in inputs[document_variable_name])

    def asked(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        question = inputs.get(question_variable_name)
        about: dict[str, Any] = {"documents": list(inputs[document_variable_name])}
        if isinstance(question, str):
            about["question"] = question
        format_inputs = RunnablePassthrough.assign(**{document_variable_name: written})
        return format_inputs.with_config(run_name="format_inputs") | prompt | _told(llm, about) | parser

    return RunnableLambda(asked).with_config(run_name="cacheclip_documents_chain")


def _told(llm: Runnable[Any, Any], about: dict[str, Any]) -> Runnable[Any, Any]:
    """``llm`` with the arguments ``about`` bound to our models only: other models would refuse them."""

    def with_parts(**parts: Any) -> Runnable[Any, Any]:
        copied: Runnable[Any, Any] = llm.model_copy(update=parts)  # type: ignore[attr-defined]
        return copied

    def told(part: Any) -> Any:
        return _told(part, about) if isinstance(part, Runnable) else lambda: _told(part(), about)

    match llm:
        case LangChainFields() | RunnableConfigurableFields(default=LangChainFields()):
            return llm.bind(**about)
        case RunnableBindingBase():
            return with_parts(bound=told(llm.bound))
        case RunnableWithFallbacks():
            return with_parts(runnable=told(llm.runnable), fallbacks=[told(each) for each in llm.fallbacks])
        case RunnableConfigurableAlternatives():
            others = {name: told(each) for name, each in llm.alternatives.items()}
            return with_parts(default=told(llm.default), alternatives=others)
        case RunnableSequence():
            return with_parts(first=told(llm.first))
    return llm
