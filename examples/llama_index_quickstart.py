"""LlamaIndex's quickstart with chunk caches: read, split, precompute, index in FAISS, ask. Run it twice: the second run
computes no chunk, and its first answer is fast."""

from __future__ import annotations

import faiss
from common import AUXILIARY, CORPUS, DIMENSIONS, FILES, PRIMARY, STORE, LlamaIndexMiniLM
from llama_index.core import SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform
from llama_index.vector_stores.faiss import FaissVectorStore

llm = CacheClipLLM(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=60)


def main() -> None:
    documents = SimpleDirectoryReader(input_files=[CORPUS / name for name in FILES]).load_data()
    for document in documents:  # the model would read paths and dates as part of the chunk
        document.excluded_llm_metadata_keys = list(document.metadata)
    index = VectorStoreIndex.from_documents(
        documents,
        storage_context=StorageContext.from_defaults(vector_store=FaissVectorStore(faiss.IndexFlatIP(DIMENSIONS))),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0), CacheClipTransform.from_llm(llm)],
        embed_model=LlamaIndexMiniLM(),
        show_progress=True,
    )
    engine = index.as_query_engine(llm=llm, similarity_top_k=4, streaming=True)
    for question in ("What must be done with modified files?", "What is a Larger Work?"):
        response = engine.query(question)
        print(f"\n{question}\n  {''.join(response.response_gen).strip()}")
    stats = llm.complete(engine.retrieve("a patent")[0].text + "\n\nWhat is this about?").additional_kwargs["cacheclip"]
    print(f"\nhits {stats['hits']}, reused {stats['reused_tokens']} of {stats['prompt_tokens']} tokens")


if __name__ == "__main__":
    main()
