"""What tests of several files need: a retriever, callbacks, plans, threads and processes."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

RAG_PROMPT = ChatPromptTemplate([("system", "Use the context.\n\n{context}"), ("human", "{input}")])


class WordRetriever(BaseRetriever):
    """The documents that share most words with the query."""

    documents: list[Document]
    k: int = 2

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        words = set(query.lower().split())
        return sorted(self.documents, key=lambda d: -len(words & set(d.page_content.lower().split())))[: self.k]


class Recorder(BaseCallbackHandler):
    """What callbacks see of the model: its tokens and its final messages."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.messages: list[AIMessage] = []

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)
