"""What tests of several files need: a retriever, callbacks, plans, threads and processes."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from cacheclip_rag.guards import Observer

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


class Questions(Observer):
    """What scored the chunks of each answer."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def on_plan(self, plan: Any, sources: Any) -> None:
        self.asked.append(plan.question)


def join_workers(before: set[threading.Thread]) -> None:
    """Wait for the threads that were not there before."""
    for thread in set(threading.enumerate()) - before - {threading.current_thread()}:
        while thread.ident is None:  # it is being started, and cannot be joined yet
            time.sleep(0.001)
        thread.join(10.0)


def exit_code_of(program: Callable[[], object]) -> int | None:
    """Run a program in a process of its own, forked, because importing torch again takes seconds."""
    process = multiprocessing.get_context("fork").Process(target=program)
    process.start()
    process.join(60)
    return process.exitcode
