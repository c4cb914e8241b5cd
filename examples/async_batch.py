"""Many questions at once with async calls, and the statistics of each answer. The answers equal those of single
calls."""

from __future__ import annotations

import asyncio

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LangChainMiniLM
from langchain_cacheclip import CacheClipVectorStore, ChatCacheClip
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

QUESTIONS = (
    "What is a Larger Work?",
    "What is Covered Software?",
    "Who may grant a patent licence?",
    "What happens after a breach?",
)
llm = ChatCacheClip(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=30)


async def main() -> None:
    store = CacheClipVectorStore(InMemoryVectorStore(LangChainMiniLM()), llm)
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
    await store.aadd_documents(splitter.split_documents([Document((CORPUS / FILES[1]).read_text())]))

    async def prompt(question: str) -> str:
        found = await store.asimilarity_search(question, k=3)
        return "\n\n".join([*(document.page_content for document in found), question])

    prompts = await asyncio.gather(*map(prompt, QUESTIONS))
    for question, answer in zip(QUESTIONS, await llm.abatch(prompts), strict=True):
        stats = answer.response_metadata["cacheclip"]
        print(f"{question}\n  {answer.content}\n  hits {stats['hits']}, first token after {stats['ttft_s']:.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
