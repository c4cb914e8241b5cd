"""The language model: LlamaIndex's eight calls on one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from cacheclip_adapters import ModelFields
from cacheclip_adapters.aio import iterate_in_thread
from cacheclip_adapters.finishing import final_events
from cacheclip_adapters.usage import telemetry, token_usage
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM

from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.models.context import known_context

from .events import CacheClipFusionEvent

if TYPE_CHECKING:
    from typing import Self

    from cacheclip_rag import Answer, Event, FusionStats

Origins = Mapping[str, Sequence[tuple[str, str]]]
"""Texts with their ``(node id, ref_doc_id)`` pairs; ``""`` if a node has no document."""

__all__ = ["CacheClipLLM"]

dispatcher = get_dispatcher(__name__)

_PASSED_OVER = {"ThinkingBlock", "ToolCallBlock", "CachePoint"}
"""Names of blocks without text for the prompt: reasoning, tool calls, marks. By name, because older versions of
LlamaIndex lack some of these classes."""
_ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}


class CacheClipLLM(ModelFields, CustomLLM):
    """A local model that reuses the precomputed KV of chunks found in its prompts.

    Existing query engines and synthesizers only need this LLM. Precompute texts once with :class:`CacheClipTransform`
    or ``llm.engine.precompute``; the LLM then finds them in every prompt. Responses have token counts in
    ``raw["usage"]`` (reused tokens as ``prompt_tokens_details["cached_tokens"]``) and fusion statistics in
    ``additional_kwargs["cacheclip"]``, beside the counts under OpenTelemetry's names
    (``gen_ai.usage.cache_read.input_tokens``). In streams, the last chunk has both.

    Each call accepts ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_p``, ``stop``, ``method``,
    ``recompute_ratio``, ``finish``, ``seed``, ``question`` (text that scores the chunks; default all text after the
    last chunk), and ``documents`` (texts known to be in the prompt; they are stored even if they were never
    precomputed). If ``documents`` maps texts to ``(node id, ref_doc_id)`` pairs, the texts are released with these
    nodes. Every answer emits a :class:`CacheClipFusionEvent`. Async calls run the model in a separate thread, which
    stops before the next token if the task is cancelled. The model's chat template renders messages;
    ``messages_to_prompt`` is not used.

    Raises:
        ConfigurationError: an unknown field or call option, a value out of range, or a message that is not text.
        PromptTooLongError: the prompt does not fit the model's context.

    >>> llm = CacheClipLLM(primary="qwen2.5-coder-0.5b", store="my-store")
    >>> index.as_query_engine(llm=llm).query("How tall is it?")
    """

    context_window: int | None = None
    """Tokens of prompt and answer; None: the model's context."""
    is_chat_model: bool = True
    """Whether LlamaIndex sends messages instead of one text."""

    _nodes: Origins = PrivateAttr(default_factory=dict)
    """Texts known to be in the prompts, and their nodes."""
    _question: str | None = PrivateAttr(default=None)
    """The question of the prompts, if it is known."""
    _told: list[dict[str, Any]] | None = PrivateAttr(default=None)
    """Gets the statistics of each answer."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipLLM"

    def with_nodes(
        self, nodes: Origins, *, question: str | None = None, told: list[dict[str, Any]] | None = None
    ) -> Self:
        """A copy of this LLM for prompts that contain the texts of these nodes. Texts that were never precomputed are
        stored after their first answer, and released with these nodes.

        Args:
            nodes: texts, each with its ``(node id, ref_doc_id)`` pairs.
            question: the user's question, which scores the chunks.
            told: gets the statistics of each answer, when the answer is complete.
        """
        llm = self.model_copy()
        llm._nodes, llm._question, llm._told = dict(nodes), question, told
        return llm

    def _shared_system_prompt(self) -> str | None:
        # LlamaIndex sends it to chat models as a system message, and pastes it before the text for other models
        return self.system_prompt if self.is_chat_model else None

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, answer length and name. Loads no weights and opens no connection."""
        return LLMMetadata(
            context_window=self.context_window or known_context(self.primary) or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.primary,
        )

    # -- completion ---------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(self._answer(self._text(prompt, formatted), kwargs))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return _completions(self._events(self._text(prompt, formatted), kwargs)())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return _completion(await self._aanswer(self._text(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        events = self._events(self._text(prompt, formatted), kwargs)
        return iterate_in_thread(lambda: _completions(events()))

    # -- chat ---------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(self._answer(_messages(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return _chats(self._events(_messages(messages), kwargs)())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await self._aanswer(_messages(messages), kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        events = self._events(_messages(messages), kwargs)
        return iterate_in_thread(lambda: _chats(events()))

    # -- the engine's two calls ---------------------------------------------------------------------------------

    def _text(self, prompt: str, formatted: bool) -> str:
        convert = None if formatted else self.completion_to_prompt
        return convert(prompt) if convert else prompt

    def _answer(self, prompt: Any, options: dict[str, Any]) -> Answer:
        answer = None
        for event in self._events(prompt, options)():
            answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    async def _aanswer(self, prompt: Any, options: dict[str, Any]) -> Answer:
        answer = None
        async with aclosing(iterate_in_thread(self._events(prompt, options))) as events:  # cancelled: the model stops
            async for event in events:
                answer = event.answer or answer
        assert answer is not None, "a stream ends with its answer"
        return answer

    def _events(self, prompt: Any, options: dict[str, Any]) -> Callable[[], Iterator[Event]]:
        """A function that starts the stream. Options are checked now; the engine is used when it is called."""
        documents = options.pop("documents", None) or ()
        arguments = self._call_arguments(options)
        if arguments["question"] is None:
            arguments["question"] = self._question

        def events() -> Iterator[Event]:
            given = _merged(self._nodes, documents)
            for event in final_events(self.engine.stream(prompt, **arguments, documents=given)):
                if event.answer is not None:
                    if self._told is not None:
                        self._told.append(event.answer.stats.to_dict())
                    dispatcher.event(self._fusion_event(event.answer.stats, _nodes_of(prompt, given)))
                yield event

        return events

    def _fusion_event(self, stats: FusionStats, node_ids: list[str]) -> CacheClipFusionEvent:
        found = stats.to_dict()
        named = {name: found[name] for name in CacheClipFusionEvent.model_fields if name in found}
        return CacheClipFusionEvent(model_name=self.primary, node_ids=node_ids, stats=found, **named)


def _messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages in the engine's format. Raises ConfigurationError for tool messages and for content without text."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: ChatMessage) -> str:
    role = _ROLES.get(message.role)
    if role is None:
        raise ConfigurationError(
            f"CacheClipLLM takes system, user and assistant messages, got role {message.role.value!r}. Tool calling is "
            "not supported: give the tool's result as a user message."
        )
    return role


def _content(message: ChatMessage) -> str:
    kinds = {type(block).__name__ for block in message.blocks if not isinstance(block, TextBlock)} - _PASSED_OVER
    if kinds:
        raise ConfigurationError(
            f"CacheClipLLM reads text only, got a message with {', '.join(sorted(kinds))}. Leave it out, or describe "
            "it in words."
        )
    return message.content or ""


def _merged(nodes: Origins, documents: str | Iterable[str] | Origins) -> Origins:
    """Texts known for all prompts and for this prompt, each with all of its nodes."""
    from cacheclip_rag.prompt.segments import chunk_texts

    if not isinstance(documents, Mapping):
        documents = dict.fromkeys(chunk_texts([documents] if isinstance(documents, str) else documents), ())
    return {text: [*nodes.get(text, ()), *documents.get(text, ())] for text in {**nodes, **documents}}


def _nodes_of(prompt: str | Sequence[Mapping[str, str]], given: Origins) -> list[str]:
    """Ids of the nodes whose whole text is in this prompt."""
    from cacheclip_rag.prompt.segments import normalise_chunk

    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    read = [text for text in given if any(normalise_chunk(text) in each for each in texts)]
    return list(dict.fromkeys(node for text in read for node, _ in given[text] if node))


def _details(answer: Answer) -> dict[str, Any]:
    """Token counts (for LlamaIndex's token counter) and fusion statistics."""
    extra = {"cacheclip": answer.stats.to_dict(), "finish_reason": answer.finish_reason, **telemetry(answer)}
    return {"raw": {"usage": token_usage(answer)}, "additional_kwargs": extra}


def _completion(answer: Answer) -> CompletionResponse:
    return CompletionResponse(text=answer.text, **_details(answer))


def _chat(answer: Answer) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=answer.text)
    return ChatResponse(message=message, **_details(answer))


def _completions(events: Iterator[Event]) -> CompletionResponseGen:
    text = ""
    for event in events:
        text += event.text
        details = _details(event.answer) if event.answer else {}
        yield CompletionResponse(text=text, delta=event.text, **details)


def _chats(events: Iterator[Event]) -> ChatResponseGen:
    text = ""
    for event in events:
        text += event.text
        details = _details(event.answer) if event.answer else {}
        message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
        yield ChatResponse(message=message, delta=event.text, **details)
