"""An existing LlamaIndex application, and the two lines that change.

    -from llama_index.llms.huggingface import HuggingFaceLLM
    +from llama_index.llms.cacheclip import CacheClipLLM
     ...
    -Settings.llm = HuggingFaceLLM(model_name="Qwen/Qwen2.5-Coder-0.5B-Instruct")
    +Settings.llm = CacheClipLLM(model_name="Qwen/Qwen2.5-Coder-0.5B-Instruct", store="my-store")

Nothing else changes. Nodes that were indexed before are not precomputed yet: one call precomputes them. Until then,
their prompts are answered by plain prefill.
"""

from __future__ import annotations

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LlamaIndexMiniLM
from llama_index.core import Settings, SimpleDirectoryReader, VectorStoreIndex
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

Settings.llm = CacheClipLLM(model_name=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=40)
Settings.embed_model = LlamaIndexMiniLM()
Settings.chunk_size = 256


def main() -> None:
    # -- the application, as it was ---------------------------------------------------------------------------
    documents = SimpleDirectoryReader(input_files=[CORPUS / FILES[1]]).load_data()
    index = VectorStoreIndex.from_documents(documents)
    engine = index.as_query_engine(similarity_top_k=3)
    print(engine.query("What is a Larger Work?"))
    # -- once, for nodes that were indexed before -------------------------------------------------------------
    CacheClipTransform.from_llm(Settings.llm)(list(index.docstore.docs.values()))
    print(engine.query("What is Covered Software?"))


if __name__ == "__main__":
    main()
