"""The language model: LlamaIndex's eight calls on one engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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
)
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import process_streaming_objects

from cacheclip_rag import MissingExtraError
from cacheclip_rag.adapters import (
    ServedFields,
    answer_in_thread,
    can_constrain,
    final_events,
    forced_tool,
    iterate_in_thread,
    last_answer,
)
from cacheclip_rag.models import is_here, known_context, knows_tools
from cacheclip_rag.plugins import shown_url

from .counting import count_with
from .events import CacheClipFusionEvent
from .messages import (
    as_arguments,
    calls_of,
    chat_response,
    chat_responses,
    completion_response,
    completion_responses,
    engine_messages,
)
from .statistics import collector

if TYPE_CHECKING:
    from typing import Self

    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools.types import BaseTool
    from pydantic import BaseModel

    from cacheclip_rag import Event, FusionStats

Origins = Mapping[str, Sequence[tuple[str, str]]]
"""Texts with their ``(node id, ref_doc_id)`` pairs; ``""`` if a node has no document."""

dispatcher = get_dispatcher(__name__)
logger = logging.getLogger("cacheclip_rag.llama_index")
"""Not ``__name__``: LlamaIndex gives its loggers, and all below them, a handler that prints nothing."""

_MUST_END = "cacheclip_must_end"
"""Option of our own calls whose answer is parsed: LlamaIndex's synthesizers would take a part of it for no answer."""


class CacheClipLLM(ServedFields, FunctionCallingLLM):
    """A local model that reuses the precomputed KV of chunks found in its prompts.

    Existing query engines and synthesizers only need this LLM. Precompute texts once with :class:`CacheClipTransform`
    or ``llm.engine.precompute``; the LLM then finds them in every prompt. Responses have token counts in
    ``raw["usage"]`` (reused tokens as ``prompt_tokens_details["cached_tokens"]``) and fusion statistics in
    ``additional_kwargs["cacheclip"]``, beside the counts under OpenTelemetry's names
    (``gen_ai.usage.cache_read.input_tokens``). In streams, the last chunk has both. The response of a query engine has
    the statistics of all its prompts in ``metadata["cacheclip"]``, with any synthesizer.

    Each call accepts ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_p``, ``top_k``,
    ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``, ``stop``, ``seed``, ``method``,
    ``recompute_ratio``, ``finish``, ``question`` (text that scores the chunks; default all text after the last chunk),
    and ``documents`` (texts known to be in the prompt; they are stored even if they were never precomputed). If
    ``documents`` maps texts to ``(node id, ref_doc_id)`` pairs, the texts are released with these nodes. Every answer
    emits a :class:`CacheClipFusionEvent`. Async calls run the model in a separate thread, which stops before the next
    token if the task is cancelled. The model's chat template renders messages; ``messages_to_prompt`` is not used.
    Tools, calls and results of tools are rendered by the chat template too; a model whose template does not use tools
    refuses them. Calls are in ``additional_kwargs["tool_calls"]`` of a response's message, in OpenAI's format.

    Structured output (``structured_predict``, ``as_structured_llm``) follows its schema where the extra ``structured``
    is installed, with every model.

    Raises:
        ConfigurationError: an unknown field or call option, a value out of range, or a message that is not text.
        PromptTooLongError: the prompt does not fit the model's context.

    >>> llm = CacheClipLLM(primary="Qwen/Qwen2.5-0.5B-Instruct", store="my-store")
    >>> index.as_query_engine(llm=llm).query("How tall is it?")
    """

    context_window: int | None = None
    """Tokens of prompt and answer; None: the model's context."""
    is_chat_model: bool = True
    """Whether LlamaIndex sends messages instead of one text."""
    is_function_calling_model: bool | None = None
    """Whether LlamaIndex gives the model tools, and makes it call one for structured output. None: if the chat template
    uses tools (known of packaged models, and of models on this machine), and the extra ``structured`` is installed. A
    component that asks and is told no gets the reason as a warning."""

    _nodes: Origins = PrivateAttr(default_factory=dict)
    """Texts known to be in the prompts, and their nodes."""
    _question: str | None = PrivateAttr(default=None)
    """The question of the prompts, if it is known."""

    @classmethod
    def class_name(cls) -> str:
        return "CacheClipLLM"

    def with_nodes(self, nodes: Origins, *, question: str | None = None) -> Self:
        """A copy of this LLM for prompts that contain the texts of these nodes. Texts that were never precomputed are
        stored after their first answer, and released with these nodes.

        Args:
            nodes: texts, each with its ``(node id, ref_doc_id)`` pairs.
            question: the user's question, which scores the chunks.
        """
        llm = self.model_copy()
        llm._nodes, llm._question = dict(nodes), question
        return llm

    def _shared_system_prompt(self) -> str | None:
        # LlamaIndex sends it to chat models as a system message, and pastes it before the text for other models
        return self.system_prompt if self.is_chat_model else None

    @property
    def metadata(self) -> LLMMetadata:
        """Context window, answer length and name. Loads no weights. A server (``base_url``) is asked once.

        From then on, LlamaIndex counts tokens with this model's tokenizer, if its files are on this machine and
        ``Settings.tokenizer`` was not set."""
        if self.base_url is None and is_here(self.primary):
            count_with(self.tokenizer)
        return _Metadata(
            context_window=self.context_window or self._known_context() or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_tokens,
            is_chat_model=self.is_chat_model,
            model_name=self.model_name,
            is_function_calling_model=self._calls_functions(),
        ).because(self._why_no_functions())

    def _known_context(self) -> int | None:
        remote = self._remote()
        return known_context(self.primary) if remote is None else remote.served.context_tokens

    def _calls_functions(self) -> bool:
        return not self._why_no_functions()

    def _why_no_functions(self) -> str:
        """Why LlamaIndex is told that this model calls no functions; empty if it is told that it does."""
        if self.is_function_calling_model is not None:
            return "" if self.is_function_calling_model else "is_function_calling_model=False is set"
        if not self.is_chat_model:
            return "is_chat_model=False is set"
        if (remote := self._remote()) is not None:
            if remote.served.uses_tools and remote.served.can_constrain:
                return ""
            return f"the server at {shown_url(self.base_url)} has a model without tools, or lacks the extra structured"
        known = knows_tools(self.primary)
        if known is None:
            return (
                f"model {self.primary!r} is not on this machine yet, so its chat template is not known. Call "
                "llm.warm_up() first, or set is_function_calling_model=True"
            )
        if not known:
            return f"the chat template of model {self.primary!r} does not use tools. Use a model that was trained to"
        if not can_constrain():
            return str(MissingExtraError("llguidance (for calls that follow their schema)", "structured"))
        return ""

    # -- completion ---------------------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_response(last_answer(self._events(self._text(prompt, formatted), kwargs)()))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return completion_responses(self._events(self._text(prompt, formatted), kwargs)())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return completion_response(await answer_in_thread(self._events(self._text(prompt, formatted), kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        events = self._events(self._text(prompt, formatted), kwargs)
        return iterate_in_thread(lambda: completion_responses(events()))

    # -- chat ---------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return chat_response(last_answer(self._events(engine_messages(messages), kwargs)()))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return chat_responses(self._events(engine_messages(messages), kwargs)())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return chat_response(await answer_in_thread(self._events(engine_messages(messages), kwargs)))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        events = self._events(engine_messages(messages), kwargs)
        return iterate_in_thread(lambda: chat_responses(events()))

    # -- tools and structured output ----------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of :meth:`chat`. A required tool call follows the tool's schema and needs the extra
        ``structured``."""
        asking = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
        return {
            "messages": [*(chat_history or ()), *([asking] if asking is not None else ())],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools] or None,
            "tool_choice": tool_choice or ("any" if tool_required else None),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response.

        Raises:
            ValueError: there is none, and ``error_on_no_tool_call`` is set.
        """
        calls = calls_of(response.message)
        if not calls and error_on_no_tool_call:
            raise ValueError(f"expected at least one tool call, got {response.message.content!r}.")
        return [
            ToolSelection(
                tool_id=call["id"],
                tool_name=call["function"]["name"],
                tool_kwargs=as_arguments(call["function"]["arguments"]),
            )
            for call in calls
        ]

    def structured_predict(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        return super().structured_predict(output_cls, prompt, self._with_schema(output_cls, llm_kwargs), **prompt_args)

    async def astructured_predict(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Any:
        options = await asyncio.to_thread(self._with_schema, output_cls, llm_kwargs)
        return await super().astructured_predict(output_cls, prompt, options, **prompt_args)

    def _can_constrain(self) -> bool:
        """Whether answers can follow a schema. Loads the model."""
        if (remote := self._remote()) is not None:
            return remote.served.can_constrain
        return can_constrain() and self.engine.primary.can_constrain

    def _with_schema(self, output_cls: type[BaseModel], options: dict[str, Any] | None) -> dict[str, Any]:
        """Options of a call whose answer is an ``output_cls``. A required tool call has its schema already."""
        constrained = self._can_constrain() and not self._calls_functions()
        wanted = {"json_schema": output_cls.model_json_schema(), _MUST_END: True} if constrained else {}
        return {**(options or {}), **wanted}

    def _structured_stream_call(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        """Partial objects from JSON as it is written."""
        if not self._can_constrain():
            yield from super()._structured_stream_call(output_cls, prompt, llm_kwargs, **prompt_args)
            return
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        found = _Partial(output_cls)
        for response in self.stream_chat(
            messages, **{**(llm_kwargs or {}), "json_schema": found.schema, _MUST_END: True}
        ):
            yield found.after(response)

    async def _structured_astream_call(
        self,
        output_cls: type[Any],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        if not await asyncio.to_thread(self._can_constrain):
            return await super()._structured_astream_call(output_cls, prompt, llm_kwargs, **prompt_args)
        messages = self._extend_messages(prompt.format_messages(llm=self, **prompt_args))
        found = _Partial(output_cls)

        async def objects() -> AsyncGenerator[Any, None]:
            options = {**(llm_kwargs or {}), "json_schema": found.schema, _MUST_END: True}
            async for response in await self.astream_chat(messages, **options):
                yield found.after(response)

        return objects()

    # -- the engine's two calls ---------------------------------------------------------------------------------

    def _text(self, prompt: str, formatted: bool) -> str:
        convert = None if formatted else self.completion_to_prompt
        return convert(prompt) if convert else prompt

    def _events(self, prompt: Any, options: dict[str, Any]) -> Callable[[], Iterator[Event]]:
        """A function that starts the stream. Options are checked now; the engine is used when it is called."""
        documents = options.pop("documents", None) or ()
        one_call = options.pop("parallel_tool_calls", None) is False
        with _failures_logged():
            must_end = bool(options.pop(_MUST_END, False)) or forced_tool(options.get("tool_choice"))[0]
            call = self._call_options(options)
        if call.question is None:
            call = replace(call, question=self._question)
        collect = collector()

        def events() -> Iterator[Event]:
            given = _merged(self._nodes, documents)
            with _failures_logged():
                stream = self._answering().stream(prompt, options=replace(call, documents=given))
                for event in final_events(stream, one_call=one_call, must_end=must_end):
                    if event.answer is not None:
                        if collect is not None:
                            collect(event.answer.stats.to_dict())
                        dispatcher.event(self._fusion_event(event.answer.stats, _nodes_of(prompt, given)))
                    yield event

        return events

    def _fusion_event(self, stats: FusionStats, node_ids: list[str]) -> CacheClipFusionEvent:
        found = stats.to_dict()
        named = {name: found[name] for name in CacheClipFusionEvent.model_fields if name in found}
        return CacheClipFusionEvent(model_name=self.model_name, node_ids=node_ids, stats=found, **named)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Log what ends an answer: sub-question engines, extractors and agents' tools catch every error and go on."""
    try:
        yield
    except Exception as error:
        logger.warning("an answer failed: %s: %s", type(error).__name__, error)
        raise


class _Metadata(LLMMetadata):
    """Metadata that says why a model calls no functions to those who ask: LlamaIndex's agents refuse it without a
    reason."""

    _reason: str = PrivateAttr(default="")

    def because(self, reason: str) -> Self:
        self._reason = reason
        return self

    def __getattribute__(self, name: str) -> Any:
        if name == "is_function_calling_model" and self._reason:
            _warn_once(f"LlamaIndex is told that this model calls no functions: {self._reason}.")
        return super().__getattribute__(name)


@lru_cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


class _Partial:
    """Objects from answers that are not complete yet."""

    def __init__(self, output_cls: type[Any]) -> None:
        self.schema = output_cls.model_json_schema()
        self._output_cls = output_cls
        self._found: Any = None

    def after(self, response: ChatResponse) -> Any:
        """The object as far as it is written."""
        found = process_streaming_objects(response, self._output_cls, self._found and [self._found])
        self._found = found[0] if isinstance(found, list) else found
        return self._found


def _merged(nodes: Origins, documents: str | Iterable[str] | Origins) -> Origins:
    """Texts known for all prompts and for this prompt, each with all of its nodes."""
    from cacheclip_rag.adapters import chunk_texts

    if not isinstance(documents, Mapping):
        documents = dict.fromkeys(chunk_texts([documents] if isinstance(documents, str) else documents), ())
    return {text: [*nodes.get(text, ()), *documents.get(text, ())] for text in {**nodes, **documents}}


def _nodes_of(prompt: str | Sequence[Mapping[str, str]], given: Origins) -> list[str]:
    """Ids of the nodes whose whole text is in this prompt."""
    from cacheclip_rag.adapters import normalise_chunk

    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    read = [text for text in given if any(normalise_chunk(text) in each for each in texts)]
    return list(dict.fromkeys(node for text in read for node, _ in given[text] if node))
