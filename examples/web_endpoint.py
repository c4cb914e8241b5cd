"""A streaming web endpoint (FastAPI). Serve it: ``uvicorn web_endpoint:app``, then
``curl -N 'localhost:8000/ask?question=What+is+a+Larger+Work'``. The model runs in a separate thread, so that the event
loop stays responsive."""

from __future__ import annotations

from collections.abc import AsyncIterator

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LangChainMiniLM
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from langchain_cacheclip import CacheClipVectorStore, ChatCacheClip
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

llm = ChatCacheClip(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=60)
splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
store = CacheClipVectorStore(InMemoryVectorStore(LangChainMiniLM()), llm)
store.add_documents(splitter.split_documents([Document((CORPUS / name).read_text()) for name in FILES]))
app = FastAPI()


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    found = await store.asimilarity_search(question, k=4)
    prompt = "\n\n".join([*(document.page_content for document in found), f"Question: {question}"])

    async def tokens() -> AsyncIterator[str]:
        async for part in llm.astream(prompt):
            yield str(part.text)

    return StreamingResponse(tokens(), media_type="text/plain")


@app.get("/metrics")
def metrics() -> PlainTextResponse:
    """Hits, misses, tokens and seconds, for Prometheus."""
    return PlainTextResponse(llm.engine.metrics.to_prometheus())
