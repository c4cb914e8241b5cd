"""A chat with memory over documents, with LlamaIndex's chat engine. KV of retrieved chunks comes from the store; KV of
the conversation so far comes from the exact prefix cache."""

from __future__ import annotations

from common import AUXILIARY, CORPUS, FILES, PRIMARY, STORE, LlamaIndexMiniLM
from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.cacheclip import CacheClipFusionEvent, CacheClipLLM, CacheClipTransform

llm = CacheClipLLM(primary=PRIMARY, auxiliary=AUXILIARY, store=STORE, max_tokens=40)


class Watch(BaseEventHandler):
    """Prints what each answer reused."""

    def handle(self, event: object, **_: object) -> None:
        if isinstance(event, CacheClipFusionEvent):
            print(f"  [hits {event.hits}, reused {event.reused_tokens} of {event.prompt_tokens} tokens]")


def main() -> None:
    get_dispatcher().add_event_handler(Watch())
    documents = SimpleDirectoryReader(input_files=[CORPUS / FILES[1]]).load_data()
    for document in documents:
        document.excluded_llm_metadata_keys = list(document.metadata)
    splitting = [SentenceSplitter(chunk_size=256, chunk_overlap=0), CacheClipTransform.from_llm(llm)]
    index = VectorStoreIndex.from_documents(documents, transformations=splitting, embed_model=LlamaIndexMiniLM())
    chat = index.as_chat_engine(chat_mode="context", llm=llm, similarity_top_k=3)
    for said in ("What is a Larger Work?", "And may it be under another licence?", "Say that in one sentence."):
        print(f"> {said}\n  {chat.chat(said)}")


if __name__ == "__main__":
    main()
