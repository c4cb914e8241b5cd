"""The chat model: LangChain's four ways to ask, over one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import Field, SecretStr

from cacheclip_rag.aio import iterate_in_thread
from cacheclip_rag.errors import ConfigurationError

from .base import ModelFields, document_texts, ending

if TYPE_CHECKING:
    from cacheclip_rag import Answer, StreamEvent

__all__ = ["ChatCacheClip"]

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


class ChatCacheClip(ModelFields, BaseChatModel):
    """A local chat model whose prompts reuse the precomputed KV of the documents found in them.

    Stock chains need nothing but this model: texts that were precomputed once, with ``llm.engine.precompute``, are
    recognised in whatever prompt arrives. Reused tokens are in
    ``usage_metadata["input_token_details"]["cache_read"]``, the fusion statistics in
    ``response_metadata["cacheclip"]``; streams carry both on the last chunk.

    Each call accepts ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_p``, ``stop``, ``method``,
    ``recompute_ratio``, ``seed``, and ``documents``: Documents or strings known to be in the prompt, so that they are
    stored even if they were never precomputed. Messages may carry them too: text blocks with an ``id`` (of system,
    human and tool messages), ``text-plain`` blocks, a tool message's ``artifact``, ``additional_kwargs["documents"]``.
    The async calls run the model in a worker thread.

    The constructor only checks settings; weights load at the first call, and models with equal settings share them.
    Of a message's content blocks the text is read and the rest is not. The model calls no tools (``bind_tools`` is not
    there); tool messages, and the calls they answer, are read as the chat template writes them.

    Raises:
        ConfigurationError: an unknown field or call option, a value out of range, or a message that is not text.
        PromptTooLongError: the prompt does not fit the model's context.

    >>> llm = ChatCacheClip(model="qwen2.5-coder-0.5b", store="my-store")
    >>> llm.invoke("How tall is the Eiffel Tower?").content
    """

    streaming: bool = False
    """Whether ``invoke`` streams inside, so that callbacks see tokens."""
    timeout: float | None = None
    """Accepted because chains pass it; a local model has no request to time out."""
    max_retries: int | None = None
    """Accepted because chains pass it; a local model has no request to repeat."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted because chains pass it; a local model needs none."""

    @property
    def _llm_type(self) -> str:
        return "cacheclip-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    # -- LangChain's four calls ---------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self._asked("generate", messages, stop, kwargs)())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(await asyncio.to_thread(self._asked("generate", messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(self._asked("generate_stream", messages, stop, kwargs)):
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        events = self._asked("generate_stream", messages, stop, kwargs)
        async for chunk in iterate_in_thread(lambda: self._chunks(events)):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    # -- the engine's two calls ---------------------------------------------------------------------------------

    def _asked(
        self, call: str, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Callable[[], Any]:
        return self._bind(call, _messages(messages), stop, options, _carried(messages))

    # -- answers as LangChain has them --------------------------------------------------------------------------

    def _result(self, answer: Answer) -> ChatResult:
        metadata = {"model_name": self.model_name, **ending(answer)}
        message = AIMessage(
            content=answer.text, response_metadata=metadata, usage_metadata=_usage(answer, self._stored_tokens(answer))
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(self, events: Callable[[], Iterator[StreamEvent]]) -> Iterator[ChatGenerationChunk]:
        """Chunks add up: what must not be added twice is on the first (name) or on the last (counts) only."""
        metadata: dict[str, Any] = {"model_name": self.model_name}
        for event in events():
            message = AIMessageChunk(content=event.text, response_metadata=metadata)
            if event.answer:
                message.response_metadata = {**metadata, **ending(event.answer)}
                message.usage_metadata = _usage(event.answer, self._stored_tokens(event.answer))
                message.chunk_position = "last"
            yield ChatGenerationChunk(message=message)
            metadata = {}


def _usage(answer: Answer, stored: int) -> UsageMetadata:
    prompt, completion = answer.stats.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details=InputTokenDetails(cache_read=answer.stats.reused_tokens, cache_creation=stored),
    )


def _messages(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Messages as the engine takes them. Raises ConfigurationError for unknown roles and for content without text."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    kind = message.type.removesuffix("MessageChunk").lower()
    if kind == "chat" and getattr(message, "role", None) in _ROLES.values():
        return str(message.role)  # type: ignore[attr-defined]
    if kind not in _ROLES:
        raise ConfigurationError(
            f"ChatCacheClip takes system, human, AI and tool messages, got a {message.type!r} message. Give its "
            "content as a human message."
        )
    return _ROLES[kind]


def _content(message: BaseMessage) -> str:
    calls = [
        f"<tool_call>\n{json.dumps({'name': call['name'], 'arguments': call['args']})}\n</tool_call>"
        for call in getattr(message, "tool_calls", None) or ()
    ]
    plain = [block["text"] for block in _blocks(message) if block.get("type") == "text-plain" and block.get("text")]
    text = "\n\n".join([*plain, *([str(message.text)] if message.text else []), *calls])
    if message.content and not text:
        raise ConfigurationError(f"ChatCacheClip reads text only, got a {message.type} message without any.")
    return text


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    content = message.content if isinstance(message.content, list) else []
    return [block for block in content if isinstance(block, dict)]


def _carried(messages: Sequence[BaseMessage]) -> list[str]:
    """Texts of retrieved documents that messages carry beside their content."""
    found: list[Any] = []
    for message in messages:
        found += _documents_in(message.additional_kwargs.get("documents"))
        if isinstance(message, ToolMessage):
            found += _documents_in(message.artifact)
        for block in _blocks(message):
            is_document = block.get("type") == "text" and block.get("id") and not isinstance(message, AIMessage)
            if is_document or block.get("type") == "text-plain":
                found.append(block.get("text") or "")
    return document_texts(found)


def _documents_in(carrier: Any) -> list[Any]:
    """Documents and strings out of whatever a tool or a chain attached; all else is not for us."""
    if isinstance(carrier, dict):
        carrier = carrier.get("documents")
    several = carrier if isinstance(carrier, list | tuple) else [carrier]
    return [each for each in several if isinstance(each, str | Document)]
