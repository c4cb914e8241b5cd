"""LangChain's quickstart with chunk caches: split, index incrementally, ask with a retrieval chain."""

from __future__ import annotations

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LangChainMiniLM
from langchain_cacheclip import CacheClipVectorStore, ChatCacheClip, create_cacheclip_documents_chain
from langchain_classic.chains import create_retrieval_chain
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

llm = ChatCacheClip(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=60)
PROMPT = ChatPromptTemplate([("system", "Answer from these passages.\n\n{context}"), ("human", "{input}")])


def main() -> None:
    documents = [Document((CORPUS / name).read_text(), metadata={"source": name}) for name in FILES]
    chunks = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0).split_documents(documents)
    inner = InMemoryVectorStore(LangChainMiniLM())  # any vector store will do
    store = CacheClipVectorStore(inner, llm)  # precomputes added documents and releases deleted documents
    records = InMemoryRecordManager("licences")
    records.create_schema()
    options = {"cleanup": "incremental", "source_id_key": "source", "key_encoder": "blake2b"}
    print("indexed:", index(chunks, records, store, **options))
    print("again:  ", index(chunks, records, store, **options))
    chain = create_retrieval_chain(
        store.as_retriever(search_kwargs={"k": 4}), create_cacheclip_documents_chain(llm, PROMPT)
    )
    usage = UsageMetadataCallbackHandler()
    for question in ("What must be done with modified files?", "What is a Larger Work?"):
        print(f"\n{question}\n  ", end="")
        for part in chain.stream({"input": question}, {"callbacks": [usage]}):
            print(part.get("answer", ""), end="", flush=True)
    (tokens,) = usage.usage_metadata.values()
    print(f"\n\nread from caches: {tokens['input_token_details']['cache_read']} of {tokens['input_tokens']} tokens")


if __name__ == "__main__":
    main()
