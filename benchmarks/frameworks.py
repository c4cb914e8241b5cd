"""What the frameworks cost: seconds to the first token through LlamaIndex and LangChain, against the bare engine; and
how long an event loop waits while an answer is streamed into it.

    python benchmarks/frameworks.py --chunks 8 --runs 5

The same chunks, question and settings; runs interleaved in a random order, the prefix cache
emptied before each; medians, of the ratios within each round too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from cacheclip_lab.timing.texts import make_texts
from langchain_cacheclip import ChatCacheClip, create_cacheclip_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from llama_index.core import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.cacheclip import CacheClipLLM
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer

from cacheclip_rag import SamplingParams

QUESTION = "What is said of the river, and by whom?"
TEMPLATE = "{context_str}\n\nQuestion: {query_str}"


def first(ask: Callable[[], Iterator[Any]]) -> float:
    """Seconds to the first item. LangChain reads a chain's stream to its end when it is closed: that does not count."""
    started = time.perf_counter()
    items = ask()
    next(iter(items))
    seconds = time.perf_counter() - started
    close = getattr(items, "close", None)
    if close:
        close()
    return seconds


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
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()

    index_llm = CacheClipLLM(primary=given.primary, auxiliary=given.auxiliary, max_tokens=16)
    chain_llm = ChatCacheClip(primary=given.primary, auxiliary=given.auxiliary, max_tokens=16)
    engine = index_llm.engine
    assert engine is chain_llm.engine
    texts = make_texts(engine.primary.tokenize, given.chunks, given.chunk_tokens)
    engine.precompute(texts)
    prompt = TEMPLATE.format(context_str="\n\n".join(texts), query_str=QUESTION)
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]
    documents = [Document(text) for text in texts]
    template = PromptTemplate(TEMPLATE)
    stock = get_response_synthesizer(llm=index_llm, text_qa_template=template, streaming=True)
    ours = CacheClipSynthesizer(llm=index_llm, text_qa_template=template, streaming=True)
    chain = create_cacheclip_documents_chain(
        chain_llm, ChatPromptTemplate([("human", TEMPLATE.replace("context_str", "context"))])
    )
    params = SamplingParams(max_tokens=16)
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "engine": lambda: engine.stream(prompt, params),
        "LlamaIndex, stock synthesizer": lambda: stock.synthesize(QUESTION, nodes).response_gen,
        "LlamaIndex, CacheClipSynthesizer": lambda: ours.synthesize(QUESTION, nodes).response_gen,
        "LangChain, documents chain": lambda: chain.stream({"context": documents, "query_str": QUESTION}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(given.runs + 1):
        for name, ask in random.sample(list(ways.items()), len(ways)):
            engine.prefixes.clear()
            taken = first(ask)
            if run:  # the first warms up
                seconds[name].append(taken)

    async def stream_index() -> None:
        response = await ours.asynthesize(QUESTION, nodes)
        async for _ in response.async_response_gen():
            pass

    async def stream_chain() -> None:
        async for _ in chain.astream({"context": documents, "query_str": QUESTION}):
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
                "against_engine": {
                    name: round(statistics.median(a / b for a, b in zip(each, seconds["engine"], strict=True)), 3)
                    for name, each in seconds.items()
                },
                "longest_wait_of_event_loop_ms": waits,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
