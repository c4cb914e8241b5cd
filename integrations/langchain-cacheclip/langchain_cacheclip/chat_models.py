"""The chat model: LangChain's four calls (sync, async, streaming and not) on one engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    LC_AUTO_PREFIX,
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from cacheclip_rag import CacheClipError, ConfigurationError, ServerError
from cacheclip_rag.adapters import (
    answer_in_thread,
    as_name,
    can_constrain,
    iterate_in_thread,
    last_answer,
    past_calls,
    with_tool_choice,
)
from cacheclip_rag.models import known_context, knows_tools

from .base import LangChainFields, ending

if TYPE_CHECKING:
    from cacheclip_rag import Answer, Event, ToolCall
    from cacheclip_rag.adapters import RemoteEngine

_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}

_PASSED_OVER = {
    *("reasoning", "thinking", "redacted_thinking", "tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use"),
    *("input_json_delta", "function_call", "server_tool_call", "server_tool_call_chunk", "server_tool_result"),
}
"""Content blocks without text for the prompt: reasoning, and tool calls, which are also in ``tool_calls``."""


class ChatCacheClip(LangChainFields, BaseChatModel):
    """A local chat model that reuses the precomputed KV of documents found in its prompts.

    Existing chains only need this model. Precompute documents once with :class:`CacheClipVectorStore`,
    :class:`CacheClipDocumentTransformer` or ``llm.engine.precompute(texts, method=llm.method)``; the model then finds
    them in every prompt. ``usage_metadata["input_token_details"]["cache_read"]`` counts reused tokens, and
    ``response_metadata["cacheclip"]`` holds the fusion statistics. In streams, the last chunk has both. For a chain
    that keeps only the text, :func:`collect_cacheclip_stats` collects them.

    Each call accepts ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_p``, ``top_k``,
    ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``, ``stop``, ``seed``, ``method``,
    ``recompute_ratio``, ``finish``, ``question`` (text that scores the chunks; default all text after the last chunk),
    and ``documents`` (Documents or strings known to be in the prompt; they are stored even if they were never
    precomputed). Messages may also carry documents: in ``text-plain`` blocks, in a tool message's ``artifact``, in
    ``additional_kwargs["documents"]``, and in text blocks with your own ``id`` in system, human and tool messages. The
    last block of the last human message is the question, not a document. A stored document with an id is released
    together with this id (:class:`CacheClipVectorStore`). Async calls run the model in a separate thread; a cancelled
    call stops before the next token.

    The constructor only checks settings. Weights load at the first call, and models with equal settings share them.
    The model reads the text of messages and refuses other content. Its reasoning is in
    ``additional_kwargs["reasoning_content"]``, and its template says what it reads of earlier reasoning;
    ``chat_template_kwargs={"enable_thinking": False}`` switches it off in Qwen 3's way. Tools, calls and tool messages
    are rendered by the chat template. If the template does not write earlier calls, they become text of their message:
    JSON between ``<tool_call>`` and ``</tool_call>``. A model whose template does not use tools refuses ``tools``.

    Raises:
        ConfigurationError: an unknown field or call option, a value out of range, or a message that is not text.
        PromptTooLongError: the prompt does not fit the model's context. The error is also LangChain's
            ``ContextOverflowError``.

    >>> llm = ChatCacheClip(primary="Qwen/Qwen2.5-0.5B-Instruct", store="my-store")
    >>> llm.invoke("How tall is the Eiffel Tower?").content
    """

    streaming: bool = False
    """Whether ``invoke`` streams internally, so that callbacks get tokens."""
    max_retries: int | None = None
    """Ignored; accepted because chains pass it."""

    @property
    def _llm_type(self) -> str:
        return "cacheclip-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    def _resolve_model_profile(self) -> ModelProfile | None:
        """Profile for agents and trimmers: what is known without loading the model. With ``base_url``, the rest comes
        from the server when the profile is first read."""
        profile = ModelProfile(text_inputs=True, text_outputs=True, image_inputs=False)
        if self.base_url is not None:
            return profile
        profile["structured_output"] = can_constrain()
        if (tools := knows_tools(self.primary)) is not None:
            profile["tool_calling"] = tools
        with suppress(CacheClipError, OSError, ValueError):  # loading the model reports the reason
            if tokens := known_context(self.primary):
                profile["max_input_tokens"] = tokens
        return profile

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != "profile" or found is None or self.base_url is None or "structured_output" in found:
            return found
        with suppress(ServerError, ConfigurationError):  # the first answer reports the reason
            served = cast("RemoteEngine", self._answering()).served
            own = {"structured_output": served.can_constrain, "tool_calling": served.uses_tools}
            self.__dict__[name] = found = {"max_input_tokens": served.context_tokens, **own, **found}
        return found

    # -- tools and structured output ----------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools that it may call.

        Args:
            tools: functions, LangChain tools, pydantic classes, or definitions in OpenAI's function format.
            kwargs: options of a call. With ``response_format`` (OpenAI's) or ``json_schema``, the answer is a call or
                follows the schema.
            tool_choice: ``any`` (also ``required``, True): the answer is a call of one of them; a name: of this one;
                ``none``: no call; default the model decides. A forced call needs the extra ``structured``.
            parallel_tool_calls: False: calls after the first of an answer are left out.
            strict: ignored: arguments of forced calls always follow their schema, and others may not.

        Raises:
            ConfigurationError: a malformed definition, or the choice of an unknown tool. At the first call: the
                model's chat template does not use tools.
        """
        options = {**kwargs, "tools": [convert_to_openai_tool(tool) for tool in tools], "tool_choice": tool_choice}
        with_tool_choice(options)  # report what is wrong now, not at the first call
        if parallel_tool_calls is not None:
            options["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**options)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """This model with answers of a given structure. Needs the extra ``structured``.

        Args:
            schema: a pydantic class (answers are its instances), a typed dict or a JSON schema (answers are dicts).
            include_raw: answers are dicts with ``raw`` (the message), ``parsed`` and ``parsing_error``.
            method: ``json_schema``: the answer is JSON that follows the schema, with every model; the prompt does not
                contain the schema. ``function_calling``: the answer is a call of a tool with this schema, with models
                whose chat template uses tools. ``json_mode``: the answer is any JSON object, and the prompt must say
                which.
            strict: ignored: the schema is always followed.

        Raises:
            ConfigurationError: an unknown method.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method not in ("json_schema", "json_mode"):
            raise ConfigurationError(f"method must be json_schema, function_calling or json_mode, got {method!r}.")
        is_json = isinstance(schema, dict) and not {"name", "function", "parameters"} & schema.keys()
        wanted = schema if is_json else convert_to_json_schema(schema)
        llm = self.bind(
            json_schema=wanted if method == "json_schema" else {"type": "object"},
            ls_structured_output_format={"kwargs": {"method": method}, "schema": wanted},
            **kwargs,
        )
        parser: BaseOutputParser[Any] = _WholeJson()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = _WholeObject(pydantic_object=schema)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    # -- LangChain's four calls ---------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(last_answer(self._asked(messages, stop, kwargs)()))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(await answer_in_thread(self._asked(messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(self._asked(messages, stop, kwargs)):
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
        events = self._asked(messages, stop, kwargs)
        async for chunk in iterate_in_thread(lambda: self._chunks(events)):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _asked(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Callable[[], Iterator[Event]]:
        return self._bind(_messages(messages), stop, options, _carried(messages))

    # -- LangChain's result types -------------------------------------------------------------------------------

    def _result(self, answer: Answer) -> ChatResult:
        metadata = {"model_name": self.model_name, **ending(answer)}
        message = AIMessage(
            content=answer.text,
            additional_kwargs=_reasoned(answer.reasoning),
            tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.tool_calls],
            response_metadata=metadata,
            usage_metadata=_usage(answer, self._stored_tokens(answer)),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(self, events: Callable[[], Iterator[Event]]) -> Iterator[ChatGenerationChunk]:
        """LangChain adds chunks up, so the model's name is on the first chunk only, and counts on the last chunk
        only."""
        metadata: dict[str, Any] | None = None
        called = 0
        for event in events():
            metadata = {"model_name": self.model_name} if metadata is None else metadata
            chunks = [_call_chunk(call, called + number) for number, call in enumerate(event.tool_calls)]
            called += len(chunks)
            message = AIMessageChunk(
                content=event.text,
                additional_kwargs=_reasoned(event.reasoning),
                tool_call_chunks=chunks,
                response_metadata=metadata,
            )
            if event.answer:
                message.response_metadata = {**metadata, **ending(event.answer)}
                message.usage_metadata = _usage(event.answer, self._stored_tokens(event.answer))
                message.chunk_position = "last"
            yield ChatGenerationChunk(message=message)
            metadata = {}


class _Whole:
    """Refuses JSON that was cut off, of which LangChain's parsers take what is there."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        message = getattr(result[0], "message", None)
        if message is not None and message.response_metadata.get("finish_reason") == "length":
            try:
                json.loads(result[0].text)
            except ValueError:
                raise OutputParserException(
                    "the answer had to be JSON, and was cut off. Raise max_tokens.", llm_output=result[0].text
                ) from None
        return super().parse_result(result, partial=partial)  # type: ignore[misc]


class _WholeJson(_Whole, JsonOutputParser):
    pass


class _WholeObject(_Whole, PydanticOutputParser[Any]):
    pass


def _reasoned(text: str) -> dict[str, Any]:
    """Reasoning, where LangChain looks for it."""
    return {"reasoning_content": text} if text else {}


def _call_chunk(call: ToolCall, index: int) -> Any:
    return tool_call_chunk(name=call.name, args=json.dumps(call.arguments, ensure_ascii=False), id=call.id, index=index)


def _usage(answer: Answer, stored: int) -> UsageMetadata:
    prompt, completion = answer.stats.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details=InputTokenDetails(cache_read=answer.stats.reused_tokens, cache_creation=stored),
    )


def _messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages in the engine's format. Raises ConfigurationError for unknown roles and, but in earlier turns and in
    answers, for content that is no text."""
    roles = [_role(message) for message in messages]
    last = max((number for number, role in enumerate(roles) if role == "user"), default=0)
    lenient = [role == "assistant" or (role != "system" and number < last) for number, role in enumerate(roles)]
    return [
        {"role": role, "content": _content(message, is_lenient=is_lenient), **_calling(message)}
        for message, role, is_lenient in zip(messages, roles, lenient, strict=True)
    ]


def _calling(message: BaseMessage) -> dict[str, Any]:
    """What a message says beside its content: an AI message calls and reasoning, a tool message which call it
    answers."""
    if isinstance(message, ToolMessage):
        return {"tool_call_id": as_name(message.tool_call_id), "name": as_name(message.name or "")}
    if isinstance(message, FunctionMessage):
        return {"name": as_name(message.name)}
    if not isinstance(message, AIMessage):
        return {}
    named = past_calls(
        [
            {"id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
            for call in (*message.tool_calls, *message.invalid_tool_calls)  # cut off, or malformed
        ]
    )
    return {**({"tool_calls": named} if named else {}), **_reasoned(_reasoning(message))}


def _reasoning(message: AIMessage) -> str:
    """The reasoning of an earlier answer, beside or in its content."""
    found = message.additional_kwargs.get("reasoning_content")
    if isinstance(found, str):
        return found
    texts = [block.get(str(block.get("type"))) for block in _blocks(message)]
    kinds = ("reasoning", "thinking")
    return "\n".join(
        t for t, b in zip(texts, _blocks(message), strict=True) if b.get("type") in kinds and isinstance(t, str)
    )


def _role(message: BaseMessage) -> str:
    kind = message.type.removesuffix("MessageChunk").lower()
    if isinstance(message, ChatMessage) and message.role in (*_ROLES.values(), "developer"):
        return "system" if message.role == "developer" else message.role
    if kind not in _ROLES:
        raise ConfigurationError(
            f"ChatCacheClip takes system, human, AI and tool messages, got a {message.type!r} message. Give its "
            "content as a human message."
        )
    return _ROLES[kind]


def _content(message: BaseMessage, *, is_lenient: bool) -> str:
    """The text of a message, block by block. Documents are separate paragraphs. ``is_lenient``: without what is no
    text."""
    paragraphs = [""]
    for block in _blocks(message):
        kind = block.get("type")
        if kind == "text":
            paragraphs[-1] += block.get("text") or ""
        elif kind == "text-plain" and block.get("text"):
            paragraphs += [block["text"], ""]
        elif kind not in _PASSED_OVER and not is_lenient:
            raise ConfigurationError(
                f"ChatCacheClip reads text only, got a block of type {kind!r} in a message of type {message.type!r}. "
                "Leave the block out, or put its text in a text block."
            )
    text = "\n\n".join(filter(None, paragraphs))
    if message.content and not text and not is_lenient:
        raise ConfigurationError(f"ChatCacheClip reads text only, got a message of type {message.type!r} without text.")
    return text


def _blocks(message: BaseMessage) -> list[dict[str, Any]]:
    content = [message.content] if isinstance(message.content, str) else message.content
    return [{"type": "text", "text": block} if isinstance(block, str) else block for block in content]


def _carried(messages: Sequence[BaseMessage]) -> list[Document | str]:
    """Retrieved documents that messages carry in or beside their content."""
    asking = next((message for message in reversed(messages) if _role(message) == "user"), None)
    found: list[Document | str] = []
    for message in messages:
        found += _documents_in(message.additional_kwargs.get("documents"))
        if isinstance(message, ToolMessage):
            found += _documents_in(message.artifact)
        blocks = _blocks(message)
        for number, block in enumerate(blocks):
            is_question = message is asking and number == len(blocks) - 1
            found += _document_of(block, is_text_one=not is_question and not isinstance(message, AIMessage))
    return found


def _document_of(block: dict[str, Any], *, is_text_one: bool) -> list[Document | str]:
    """The document in a block, if any. ``is_text_one``: whether a text block with an id is a document."""
    identity = str(block.get("id") or "")
    if identity.startswith(LC_AUTO_PREFIX):
        identity = ""  # LangChain gives blocks without an id its own
    if block.get("type") == "text-plain" or (block.get("type") == "text" and identity and is_text_one):
        return [Document(block.get("text") or "", id=identity or None)]
    return []


def _documents_in(carrier: Any) -> list[Document | str]:
    """Documents and strings that a tool or a chain attached; other objects are ignored."""
    if isinstance(carrier, dict):
        carrier = carrier.get("documents")
    several = carrier if isinstance(carrier, list | tuple) else [carrier]
    return [each for each in several if isinstance(each, str | Document)]
