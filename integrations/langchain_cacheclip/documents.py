"""Documents on their way to the model: a transformer that precomputes them, and a chain that says which they are."""

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

from cacheclip_rag.errors import ConfigurationError

from .base import LangChainFields, origin

__all__ = ["CacheClipDocumentTransformer", "create_cacheclip_documents_chain"]

_CONTENT = PromptTemplate.from_template("{page_content}")


class CacheClipDocumentTransformer(BaseDocumentTransformer):
    """Precomputes documents on their way into a store, and returns them unchanged.

    Put it behind the splitter: what is stored is each document's ``page_content`` as it is then, for the method of the
    model. Deletions do not pass a transformer: call ``llm.engine.release(sources=names)``. A name is the ``source`` in
    the documents' metadata, for all that came of it, or a document's id where it has one (splitters give none). Where
    the vector store is a :class:`CacheClipVectorStore`, which precomputes and releases by itself, leave this out.

    Args:
        llm: the model that will read them.
    """

    def __init__(self, llm: LangChainFields) -> None:
        self.llm = llm

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """Precompute those that hold text.

        Raises:
            PromptTooLongError: a document longer than the model's context; it is LangChain's ``ContextOverflowError``
                too.
        """
        self.llm._precompute(map(_named, documents))
        return documents

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The same in a thread of its own; cancelled, it stops at the next document."""
        await self.llm._aprecompute(map(_named, documents))
        return documents


def _named(document: Document) -> Document:
    """What has no id goes by what it came of."""
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
    """As ``create_stuff_documents_chain``, with the documents handed to the model beside the prompt: those that were
    never precomputed are stored after their first answer.

    Args:
        llm: a :class:`ChatCacheClip` or :class:`CacheClipLLM`, bound, configured or with fallbacks as you like: models
            of other makers among these get the prompt alone.
        prompt: with the variable ``document_variable_name``.
        output_parser: default a string.
        document_prompt: how a document is written; default its ``page_content``. What else it writes (a title, a
            page) is ordinary text around the chunk.
        question_variable_name: the user's words among the inputs, which choose what is recomputed; where there is none
            such, all text behind the documents does.

    Raises:
        ConfigurationError: a prompt without the variable of the documents.
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
        question = inputs.get(question_variable_name)
        about: dict[str, Any] = {"documents": list(inputs[document_variable_name])}
        if isinstance(question, str):
            about["question"] = question
        format_inputs = RunnablePassthrough.assign(**{document_variable_name: written})
        return format_inputs.with_config(run_name="format_inputs") | prompt | _told(llm, about) | parser

    return RunnableLambda(asked).with_config(run_name="cacheclip_documents_chain")


def _told(llm: Runnable[Any, Any], about: dict[str, Any]) -> Runnable[Any, Any]:
    """``llm`` with what is known of the prompt for what of it is ours: another model would not know these words."""

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
