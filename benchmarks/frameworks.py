"""What the frameworks cost: seconds to the first token through LlamaIndex and LangChain, against the bare engine; and
how long an event loop waits while an answer is streamed into it.

    python benchmarks/frameworks.py --primary qwen2.5-coder-0.5b --auxiliary smollm2-135m --chunks 8 --runs 5

The same chunks, question and settings; runs interleaved, the prefix cache emptied before each; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from langchain_cacheclip import ChatCacheClip, create_cacheclip_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.cacheclip import CacheClipLLM
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer

from cacheclip_rag import SamplingParams
from cacheclip_rag.training.families import synthetic_samples

TEMPLATE = "{context_str}\n\nQuestion: {query_str}"


def first(items: Iterator[Any]) -> None:
    """Take one and leave."""
    next(iter(items))
    close = getattr(items, "close", None)
    if close:
        close()


async def longest_wait(run: Callable[[], Any]) -> float:
    """Seconds that a task which only wants to tick had to wait longest, while ``run`` streamed."""
    waits, over = [0.0], asyncio.Event()

    async def tick() -> None:
        while not over.is_set():
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - started - 0.001)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.05)
    await run()
    over.set()
    await ticking
    return max(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="smollm2-135m")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--words", type=int, default=180, help="Words of a chunk.")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()

    sample = synthetic_samples("test", 1, num_chunks=given.chunks, chunk_words=given.words)[0]
    texts, question = list(sample.chunks), sample.question
    index_llm = CacheClipLLM(model_name=given.primary, auxiliary_model_name=given.auxiliary, max_new_tokens=16)
    chain_llm = ChatCacheClip(model=given.primary, auxiliary=given.auxiliary, max_tokens=16)
    engine = index_llm.engine
    assert engine is chain_llm.engine
    engine.precompute(texts)
    prompt = TEMPLATE.format(context_str="\n\n".join(texts), query_str=question)
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]
    documents = [Document(text) for text in texts]
    template = PromptTemplate(TEMPLATE)
    stock = get_response_synthesizer(llm=index_llm, text_qa_template=template, streaming=True)
    ours = CacheClipSynthesizer(llm=index_llm, text_qa_template=template, streaming=True)
    chain = create_cacheclip_documents_chain(
        chain_llm, ChatPromptTemplate([("human", TEMPLATE.replace("context_str", "context"))])
    )
    params = SamplingParams(max_tokens=16)
    ways: dict[str, Callable[[], None]] = {
        "engine": lambda: first(engine.generate_stream(prompt, params)),
        "LlamaIndex, stock synthesizer": lambda: first(stock.synthesize(question, nodes).response_gen),
        "LlamaIndex, CacheClipSynthesizer": lambda: first(ours.synthesize(question, nodes).response_gen),
        "LangChain, documents chain": lambda: first(chain.stream({"context": documents, "query_str": question})),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(given.runs + 1):
        for name, ask in ways.items():
            engine.prefixes.clear()
            started = time.perf_counter()
            ask()
            if run:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    bare = statistics.median(seconds["engine"])

    async def stream_index() -> None:
        response = await ours.asynthesize(question, nodes)
        async for _ in response.async_response_gen():
            pass

    async def stream_chain() -> None:
        async for _ in chain.astream({"context": documents, "query_str": question}):
            pass

    waits = {}
    for name, stream in (("LlamaIndex", stream_index), ("LangChain", stream_chain)):
        engine.prefixes.clear()
        waits[name] = round(1000 * asyncio.run(longest_wait(stream)), 1)
    print(
        json.dumps(
            {
                "prompt_tokens": engine.generate(prompt, SamplingParams(max_tokens=1)).stats.prompt_tokens,
                "first_token_s": {name: round(statistics.median(each), 3) for name, each in seconds.items()},
                "against_engine": {name: round(statistics.median(each) / bare, 3) for name, each in seconds.items()},
                "longest_wait_of_event_loop_ms": waits,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
