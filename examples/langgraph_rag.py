"""A LangGraph of two steps: retrieve, answer. The graph's state holds the documents, and the model gets them beside the
prompt. Documents that were never precomputed are stored after their first answer."""

from __future__ import annotations

from typing import TypedDict

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LangChainMiniLM
from langchain_cacheclip import ChatCacheClip
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import END, START, StateGraph

llm = ChatCacheClip(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=40)


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answer: AIMessage


def main() -> None:
    store = InMemoryVectorStore(LangChainMiniLM())
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
    store.add_documents(splitter.split_documents([Document((CORPUS / FILES[0]).read_text())]))

    def retrieve(state: State) -> State:
        return {"documents": store.similarity_search(state["question"], k=3)}

    def answer(state: State) -> State:
        texts = [document.page_content for document in state["documents"]]
        return {"answer": llm.invoke("\n\n".join([*texts, state["question"]]), documents=state["documents"])}

    builder = StateGraph(State)
    builder.add_node("retrieve", retrieve)
    builder.add_node("respond", answer)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "respond")
    builder.add_edge("respond", END)
    graph = builder.compile()
    for _ in range(2):  # the second time, the chunks are stored
        message = graph.invoke({"question": "What must be done with modified files?"})["answer"]
        stats = message.response_metadata["cacheclip"]
        print(f"{message.content}\n  hits {stats['hits']}, misses {stats['misses']}")


if __name__ == "__main__":
    main()
