"""LlamaIndex's own query engines and pipelines, with nothing swapped but the LLM."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import join_workers, leaves_the_queue
from cacheclip_testing import Latch, fake_models, fake_of
from llama_index.core import Document
from llama_index.core.base.llms import types
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

from cacheclip_rag import ConfigurationError, ModelError
from cacheclip_rag.methods import preset, vary

PROMPT = "Where did the keeper live?"
BEHIND_PREFIX = vary(preset("epic"), {"chunk_context": "prefix"})
MESSAGES = [ChatMessage(role="system", content="Answer in one word."), ChatMessage(role="user", content=PROMPT)]


class Answers(BaseEventHandler):
    """Collects what LlamaIndex's instrumentation reports at the end of every LLM call."""

    stats: list[dict[str, Any]] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent):
            self.stats.append(event.response.additional_kwargs["cacheclip"])


@pytest.fixture
def answers() -> Iterator[Answers]:
    handler = Answers(stats=[])
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler
    root.event_handlers.remove(handler)


@pytest.fixture
def llm(tmp_path: Path) -> CacheClipLLM:
    """On a fake model: what the framework does does not depend on attention."""
    return CacheClipLLM(**fake_models(), store=str(tmp_path / "store"), max_tokens=12)


@pytest.fixture
def tiny(tiny_models: dict[str, str], tmp_path: Path) -> CacheClipLLM:
    """On a transformer."""
    models: Any = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return CacheClipLLM(**models, store=str(tmp_path / "store"), max_tokens=12)


def pipeline_for(llm: CacheClipLLM) -> IngestionPipeline:
    splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
    return IngestionPipeline(transformations=[splitter, CacheClipTransform.from_llm(llm)])


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_pipelines_cache_does_not_skip_what_is_lost(
    llm: CacheClipLLM, chunks: list[str], tmp_path: Path, asynchronous: bool
) -> None:
    """It knows the nodes, and nothing of their KV."""
    pipeline, document = pipeline_for(llm), Document(text="\n\n".join(chunks))
    encoded = fake_of(llm.engine).threads["encode"]

    async def run(through: IngestionPipeline) -> list[str]:
        encoded.clear()
        run = through.arun(documents=[document]) if asynchronous else through.run(documents=[document])
        nodes = await run if isinstance(run, Coroutine) else run
        texts = [node.get_content(MetadataMode.LLM) for node in nodes]
        assert all(map(llm.engine.is_stored, texts)) and len(texts) > 2
        return texts

    texts = await run(pipeline)
    assert encoded
    for _ in range(2):
        await run(pipeline)
        assert not encoded
    llm.engine.release(texts[:1])
    await run(pipeline)
    assert len(encoded) == 1, "what is lost, and no more"
    pipeline.persist(str(tmp_path / "pipeline"))
    llm.engine.release(texts)
    again = pipeline_for(llm)
    again.load(str(tmp_path / "pipeline"))
    assert again.cache.cache.get_all(collection=again.cache.collection)
    await run(again)
    assert len(encoded) == len(texts)


def test_transform_returns_the_nodes_and_passes_over_blank_ones(llm: CacheClipLLM, chunks: list[str]) -> None:
    nodes = [TextNode(text=chunks[0]), TextNode(text="  \n"), TextNode(text="")]
    before = [node.model_copy(deep=True) for node in nodes]
    result = CacheClipTransform.from_llm(llm)(nodes)
    assert result is nodes and result == before and llm.engine.is_stored(chunks[0])


@pytest.mark.parametrize("method", ["cacheclip", BEHIND_PREFIX], ids=str)
def test_what_was_precomputed_hits_with_the_method_of_the_llm(
    tiny: CacheClipLLM, chunks: list[str], answers: Answers, method: Any
) -> None:
    llm = tiny.model_copy(update={"method": method})
    CacheClipTransform.from_llm(llm)([TextNode(text=chunk) for chunk in chunks[:2]])
    llm.complete("\n\n".join([*chunks[:2], PROMPT]))
    assert [(stats["hits"], stats["misses"]) for stats in answers.stats] == [(2, 0)]


@pytest.mark.parametrize("method", ["epic-corrected", BEHIND_PREFIX], ids=str)
def test_what_it_would_take(llm: CacheClipLLM, chunks: list[str], method: Any) -> None:
    transform = CacheClipTransform.from_llm(llm.model_copy(update={"method": method}))
    nodes = [TextNode(text=f" {text} ") for text in (chunks[0], chunks[1], chunks[1], "")]
    plan = transform.plan(nodes)
    assert (plan.chunks, plan.computed) == (3, 2)
    assert plan.tokens == sum(len(llm.engine.primary.tokenize(chunk).ids) for chunk in chunks[:2])
    assert plan.seconds > 0 and llm.engine.store.stats().entries == 0
    transform([TextNode(text=chunks[2])])  # with it, what chunks are computed behind
    before = llm.engine.store.stats().bytes
    transform(nodes)
    assert plan.bytes <= llm.engine.store.stats().bytes - before < plan.bytes * 1.1
    plan = transform.plan(nodes)
    assert (plan.chunks, plan.computed, plan.tokens, plan.bytes, plan.seconds) == (3, 0, 0, 0, 0.0)


async def test_progress_is_shown_inside_the_bar_of_a_pipeline(
    llm: CacheClipLLM, chunks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """LlamaIndex keeps ``show_progress`` to itself."""
    pipeline = IngestionPipeline(transformations=[CacheClipTransform.from_llm(llm)], disable_cache=True)
    nodes = [TextNode(text=chunk) for chunk in chunks[:2]]
    pipeline.run(nodes=nodes)
    assert "Precomputing" not in capsys.readouterr().err
    pipeline.run(nodes=nodes, show_progress=True)
    shown = capsys.readouterr().err
    assert "Applying transformations" in shown and "Precomputing chunks: 100%" in shown and "2/2" in shown
    await pipeline.arun(nodes=nodes, show_progress=True)
    assert "Precomputing chunks: 100%" in capsys.readouterr().err
    pipeline.run(nodes=nodes)
    assert "Precomputing" not in capsys.readouterr().err, "the bars are closed"


def test_pipeline_cache_tells_transforms_apart(llm: CacheClipLLM) -> None:
    transform = CacheClipTransform.from_llm(llm)
    changes = {"primary": "other", "store": "elsewhere", "namespace": "bob", "method": "direct", "dtype": "bfloat16"}
    changes["system_prompt"] = "x"
    texts = {str(transform.model_copy(update={name: value}).to_dict()) for name, value in changes.items()}
    assert len(texts | {str(transform.to_dict())}) == len(changes) + 1


async def test_reused_tokens_are_in_the_standard_fields(llm: CacheClipLLM, chunks: list[str], question: str) -> None:
    llm.engine.precompute(chunks)
    prompt = "\n\n".join([*chunks, question])
    messages = [ChatMessage(role="user", content=prompt)]
    *_, completed = llm.stream_complete(prompt)
    *_, chatted = llm.stream_chat(messages)
    last = [response async for response in await llm.astream_chat(messages)][-1]
    for response in (llm.complete(prompt), llm.chat(messages), await llm.achat(messages), completed, chatted, last):
        found, usage = response.additional_kwargs, response.raw["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert found["gen_ai.usage.cache_read.input_tokens"] == cached == found["cacheclip"]["reused_tokens"]
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert cached > 0


async def test_async_calls_keep_the_model_off_the_loop(llm: CacheClipLLM) -> None:
    await llm.acomplete(PROMPT)
    await llm.achat(MESSAGES)
    for stream in (await llm.astream_complete(PROMPT), await llm.astream_chat(MESSAGES)):
        assert [part async for part in stream]
    threads = fake_of(llm.engine).threads["prefill"]
    assert len(threads) == 4 and threading.main_thread() not in threads


async def test_closing_an_async_stream_stops_the_model(llm: CacheClipLLM) -> None:
    runtime = fake_of(llm.engine)
    runtime.says, runtime.decoding = ["word " * 1500], Latch()
    before = set(threading.enumerate())
    stream = await llm.astream_chat(MESSAGES, max_tokens=1500)
    await anext(stream)
    await stream.aclose()
    del stream
    gc.collect()  # LlamaIndex wraps the generator, and closes it with its wrapper
    for _ in range(3):
        await asyncio.sleep(0)
    runtime.decoding.open()
    await asyncio.to_thread(join_workers, before)
    assert runtime.steps == 1


async def cancelled(call: Coroutine[Any, Any, Any], gate: Latch) -> None:
    """Run until it waits at a gate, cancel it, then open the gate and wait for its threads."""
    before = set(threading.enumerate())
    task = asyncio.create_task(call)
    while not gate.reached.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    await asyncio.to_thread(join_workers, before)


@pytest.mark.parametrize("call", ["acomplete", "achat"])
async def test_cancelling_a_call_stops_the_model(llm: CacheClipLLM, call: str) -> None:
    """Before its next token."""
    runtime = fake_of(llm.engine)
    question: Any = MESSAGES if call == "achat" else PROMPT
    whole = list(llm.stream_chat(question) if call == "achat" else llm.stream_complete(question))
    runtime.steps, runtime.decoding = 0, Latch()
    await cancelled(getattr(llm, call)(question), runtime.decoding)
    assert runtime.steps == 1 < len(whole)


async def test_cancelling_a_transform_stops_it_before_the_next_batch(
    llm: CacheClipLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheclip_rag.chunks.batches._TEXTS", 1)
    runtime = fake_of(llm.engine)
    runtime.encoding = Latch()
    nodes = [TextNode(text=f"Lamp {n} was lit.") for n in range(3)]
    await cancelled(CacheClipTransform.from_llm(llm).acall(nodes), runtime.encoding)
    assert [llm.engine.is_stored(node.text) for node in nodes] == [True, False, False]


async def test_completion_to_prompt_is_applied_once_in_every_call(llm: CacheClipLLM) -> None:
    shouting = llm.model_copy(update={"completion_to_prompt": str.upper})
    raw, shouted = llm.complete(PROMPT).text, llm.complete(PROMPT.upper()).text
    assert raw != shouted
    for formatted, expected in ((False, shouted), (True, raw)):
        assert shouting.complete(PROMPT, formatted=formatted).text == expected
        assert (await shouting.acomplete(PROMPT, formatted=formatted)).text == expected
        assert list(shouting.stream_complete(PROMPT, formatted=formatted))[-1].text == expected
        stream = await shouting.astream_complete(PROMPT, formatted=formatted)
        assert [part async for part in stream][-1].text == expected


async def test_unknown_call_option_lists_the_known_ones(llm: CacheClipLLM) -> None:
    for call in (llm.complete, llm.stream_complete):
        with pytest.raises(ConfigurationError, match="unknown call option num_beams.*max_tokens"):
            call(PROMPT, num_beams=5)
    with pytest.raises(ConfigurationError, match="unknown call option num_beams"):
        await llm.astream_chat(MESSAGES, num_beams=5)


def test_messages_that_are_not_text_are_refused(llm: CacheClipLLM) -> None:
    picture = ImageBlock(image=b"0")
    for blocks in ([picture], [TextBlock(text="What is this?"), picture]):
        with pytest.raises(ConfigurationError, match="text only, got a message with ImageBlock"):
            llm.chat([ChatMessage(role=MessageRole.USER, blocks=blocks)])
    asked = ChatMessage(role=MessageRole.USER, content=PROMPT)
    for role in (MessageRole.USER, MessageRole.ASSISTANT):  # an earlier turn, with another model
        old = ChatMessage(role=role, blocks=[TextBlock(text="What is this?"), picture])
        plain = ChatMessage(role=role, content="What is this?")
        assert llm.chat([old, asked]).raw == llm.chat([plain, asked]).raw
    with pytest.raises(ConfigurationError, match="text only"):
        llm.chat([ChatMessage(role=MessageRole.SYSTEM, blocks=[picture]), asked])


def test_what_is_thought_or_called_is_passed_over(llm: CacheClipLLM) -> None:
    call = types.ToolCallBlock(tool_name="search", tool_kwargs={})
    mark = types.CachePoint(cache_control=types.CacheControl(type="x"))
    blocks = [TextBlock(text=PROMPT), types.ThinkingBlock(content="hm"), call, mark]
    answer = llm.chat([ChatMessage(role=MessageRole.USER, blocks=blocks)])
    assert answer.message.content == llm.complete(PROMPT).text


def test_metadata_reads_the_context_without_loading(tiny_models: dict[str, str], tmp_path: Path) -> None:
    """A folder without weights: whoever loads it fails."""
    shutil.copy(Path(tiny_models["llama"]) / "config.json", tmp_path)
    llm = CacheClipLLM(primary=str(tmp_path), auxiliary=None, max_tokens=12)
    assert llm.metadata.context_window == 2048 and llm.metadata.num_output == 12 and llm.metadata.is_chat_model
    assert CacheClipLLM(primary="smollm2-135m").metadata.context_window == 8192
    assert CacheClipLLM(context_window=777).metadata.context_window == 777
    assert CacheClipLLM(primary="nobody/unheard-of").metadata.context_window > 0
    with pytest.raises(ModelError):
        llm.complete(PROMPT)


@pytest.mark.long
def test_construction_loads_no_torch() -> None:
    code = """
import sys
from llama_index.llms.cacheclip import CacheClipLLM, CacheClipTransform

CacheClipTransform.from_llm(CacheClipLLM(store="s")), CacheClipLLM().metadata
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def streamed(model: Any) -> None:
    async for _ in await model.astream_complete("What?"):
        pass


@pytest.mark.parametrize("ask", [lambda model: model.acomplete("What?"), streamed], ids=["whole", "stream"])
async def test_a_cancelled_question_leaves_the_queue(llm: CacheClipLLM, ask: Callable[[Any], Awaitable[Any]]) -> None:
    """As that of a server whose client hung up."""
    await leaves_the_queue(llm, ask)
