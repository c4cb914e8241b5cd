"""What LlamaIndex expects of a language model, as one class to inherit: give it a fixture ``llm``.

In the spirit of ``langchain-tests``, which LlamaIndex has no counterpart of. Nothing in it knows CacheClip.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator, Generator, Iterator
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import LLM
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate

PROMPT = "Say something about a lighthouse."
MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, content="Where did the keeper live?"),
    ChatMessage(role=MessageRole.ASSISTANT, content="In the tower."),
    ChatMessage(role=MessageRole.USER, content=PROMPT),
]


class Names(BaseEventHandler):
    """Names of events, in order."""

    names: list[str] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.names.append(event.class_name())


class LLMConformance:
    """Inherit, and define the fixture ``llm``: greedy, a few tokens."""

    @pytest.fixture
    def names(self) -> Iterator[list[str]]:
        handler = Names(names=[])
        root = get_dispatcher()
        root.add_event_handler(handler)
        yield handler.names
        root.event_handlers.remove(handler)

    def test_what_it_is(self, llm: LLM) -> None:
        names = [cls.__name__ for cls in type(llm).__mro__]
        assert BaseLLM.__name__ in names and LLM.__name__ in names
        assert type(llm).class_name() == type(llm).__name__

    def test_metadata(self, llm: LLM) -> None:
        metadata = llm.metadata
        assert isinstance(metadata, LLMMetadata)
        assert metadata.context_window > metadata.num_output > 0 and metadata.model_name

    async def test_completion_four_ways(self, llm: LLM) -> None:
        whole = llm.complete(PROMPT)
        assert isinstance(whole, CompletionResponse) and whole.text
        streamed = llm.stream_complete(PROMPT)
        assert isinstance(streamed, Generator)
        self.check_stream(list(streamed), whole.text)
        assert (await llm.acomplete(PROMPT)).text == whole.text
        later = await llm.astream_complete(PROMPT)
        assert isinstance(later, AsyncGenerator)
        self.check_stream([part async for part in later], whole.text)

    async def test_chat_four_ways(self, llm: LLM) -> None:
        whole = llm.chat(MESSAGES)
        assert isinstance(whole, ChatResponse) and whole.message.role == MessageRole.ASSISTANT
        text = whole.message.content
        assert text
        streamed = llm.stream_chat(MESSAGES)
        assert isinstance(streamed, Generator)
        parts = list(streamed)
        assert parts[-1].message.content == text and "".join(part.delta or "" for part in parts) == text
        assert all(part.message.role == MessageRole.ASSISTANT for part in parts)
        assert (await llm.achat(MESSAGES)).message.content == text
        later = await llm.astream_chat(MESSAGES)
        assert isinstance(later, AsyncGenerator)
        assert [part async for part in later][-1].message.content == text

    def check_stream(self, parts: list[CompletionResponse], text: str) -> None:
        """Texts add up, deltas are what was added."""
        so_far = ""
        for part in parts:
            so_far += part.delta or ""
            assert part.text == so_far
        assert so_far == text and len(parts) > 1

    def test_predict_with_templates(self, llm: LLM) -> None:
        assert llm.predict(PromptTemplate("Say {what}."), what="hello")
        assert "".join(llm.stream(PromptTemplate("Say {what}."), what="hello"))
        chat = ChatPromptTemplate([ChatMessage(role=MessageRole.USER, content="Say {what}.")])
        assert llm.predict(chat, what="hello")

    async def test_predict_asynchronously(self, llm: LLM) -> None:
        template = PromptTemplate("Say {what}.")
        text = llm.predict(template, what="hello")
        assert await llm.apredict(template, what="hello") == text
        stream = await llm.astream(template, what="hello")
        assert "".join([part async for part in stream]) == text

    def test_usage_is_counted(self, llm: LLM) -> None:
        counter = TokenCountingHandler(tokenizer=lambda text: pytest.fail("it should read the usage"))
        llm = llm.model_copy(update={"callback_manager": CallbackManager([counter])})
        llm.chat(MESSAGES)
        assert counter.prompt_llm_token_count > 0 and counter.completion_llm_token_count > 0

    def test_callbacks_start_and_end(self, llm: LLM) -> None:
        debug = LlamaDebugHandler(print_trace_on_end=False)
        llm = llm.model_copy(update={"callback_manager": CallbackManager([debug])})
        llm.complete(PROMPT)
        list(llm.stream_chat(MESSAGES))
        pairs = debug.get_event_pairs(CBEventType.LLM)
        assert [len(pair) for pair in pairs] == [2, 2]

    def test_events(self, llm: LLM, names: list[str]) -> None:
        llm.chat(MESSAGES)
        list(llm.stream_complete(PROMPT))
        wanted = [name for name in names if name.startswith("LLM")]
        assert wanted[:2] == ["LLMChatStartEvent", "LLMChatEndEvent"]
        assert wanted[2] == "LLMCompletionStartEvent" and wanted[-1] == "LLMCompletionEndEvent"
        assert "LLMCompletionInProgressEvent" in wanted

    def test_fewer_tokens_and_stop(self, llm: LLM) -> None:
        text = llm.complete(PROMPT).text
        shorter = llm.complete(PROMPT, max_tokens=2).text
        assert text.startswith(shorter) and len(shorter) < len(text)
        middle = text[len(text) // 2]
        assert middle not in llm.complete(PROMPT, stop=[middle]).text

    def test_it_can_be_written_down_and_made_again(self, llm: LLM) -> None:
        made = type(llm).from_dict(json.loads(json.dumps(llm.to_dict())))
        assert made.complete(PROMPT).text == llm.complete(PROMPT).text
        assert copy.deepcopy(llm).complete(PROMPT).text == llm.complete(PROMPT).text

    async def test_many_at_once(self, llm: LLM) -> None:
        prompts = [f"{PROMPT} Number {n}." for n in range(8)]
        expected = [llm.complete(prompt).text for prompt in prompts]
        found = await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts))
        assert [each.text for each in found] == expected

    async def test_a_stream_may_be_left(self, llm: LLM) -> None:
        next(llm.stream_complete(PROMPT))
        async for _ in await llm.astream_complete(PROMPT):
            break
        assert llm.complete(PROMPT).text, "and it still answers"
