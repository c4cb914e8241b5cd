"""The chat model: LangChain's four ways to ask, over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, SecretStr

from cacheclip_rag.aio import iterate_in_thread
from cacheclip_rag.config import EngineConfig
from cacheclip_rag.errors import ConfigurationError
from cacheclip_rag.methods import DEFAULT_METHOD
from cacheclip_rag.models.catalog import DEFAULT_AUXILIARY, DEFAULT_PRIMARY
from cacheclip_rag.sampling import merge_call_options

if TYPE_CHECKING:
    from cacheclip_rag import Answer, CacheClipEngine, StreamEvent

__all__ = ["ChatCacheClip"]

_SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "seed")
_OWN = ("store", "namespace", "dtype", "device", "auxiliary")
_ROLES = {"human": "user", "ai": "assistant", "system": "system"}


class ChatCacheClip(BaseChatModel):
    """A local chat model whose prompts reuse the precomputed KV of the documents found in them.

    Stock chains need nothing but this model: texts that were precomputed once, with ``llm.engine.precompute``, are
    recognised in whatever prompt arrives. Reused tokens are in
    ``usage_metadata["input_token_details"]["cache_read"]``, the fusion statistics in
    ``response_metadata["cacheclip"]``; streams carry both on the last chunk.

    Each call accepts ``max_tokens`` (or ``max_new_tokens``), ``temperature``, ``top_p``, ``stop``, ``method``,
    ``recompute_ratio``, ``seed``, and ``documents``: Documents or strings known to be in the prompt, so that they are
    stored even if they were never precomputed. The async calls run the model in a worker thread.

    The constructor only checks settings; weights load at the first call, and models with equal settings share them.
    Of a message's content blocks the text is read and the rest is not.

    Raises:
        ConfigurationError: an unknown field or call option, a value out of range, or a message that is not text.
        PromptTooLongError: the prompt does not fit the model's context.

    >>> llm = ChatCacheClip(model="qwen2.5-coder-0.5b", store="my-store")
    >>> llm.invoke("How tall is the Eiffel Tower?").content
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(default=DEFAULT_PRIMARY, alias="model")
    """Primary model: local folder, packaged name or hub id."""
    auxiliary: str | None = DEFAULT_AUXILIARY
    """Small model that scores tokens; None for methods that need none."""
    store: str | None = None
    """Folder of the chunk-cache store; None keeps chunk caches in memory only."""
    namespace: str = "default"
    """Tenant: two namespaces never share an entry."""
    method: str = DEFAULT_METHOD
    """How chunks are reused: ``cacheclip``, ``direct`` or ``full``."""
    recompute_ratio: float = 0.2
    """Share of chunk tokens to recompute, 0 to 1."""
    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int = 256
    """Most new tokens of an answer."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this."""
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    """The answer ends before the first of these strings."""
    seed: int | None = None
    """Makes sampling repeatable."""
    dtype: str = "float32"
    """Compute dtype: ``float32``, ``bfloat16`` or ``float16``."""
    device: str = "cpu"
    """Device of both models."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other fields of EngineConfig, ``system_prompt`` or ``max_bytes`` for example."""
    streaming: bool = False
    """Whether ``invoke`` streams inside, so that callbacks see tokens."""
    timeout: float | None = None
    """Accepted because chains pass it; a local model has no request to time out."""
    max_retries: int | None = None
    """Accepted because chains pass it; a local model has no request to repeat."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Accepted because chains pass it; a local model needs none."""

    def __init__(self, **fields: Any) -> None:
        known = {key for name, field in type(self).model_fields.items() for key in (name, field.alias) if key}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ConfigurationError(f"unknown field {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        super().__init__(**fields)
        self._full_config()
        merge_call_options(self._call_settings(), {})

    @property
    def _llm_type(self) -> str:
        return "cacheclip-chat"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes the output: LangChain's response cache is keyed by it."""
        config = asdict(self._full_config())
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        # LangChain writes the call's own stop strings over a key named "stop"
        stop = {"stop_sequences": sampling.pop("stop")}
        return {"model_name": config.pop("primary"), **config, **sampling, **stop}

    # -- configuration ------------------------------------------------------------------------------------------

    def _engine_config(self) -> EngineConfig:
        """What identifies the engine. Method and ratio go with each call, so that they do not split the store."""
        doubled = sorted(set(self.engine_kwargs) & {*_OWN, "primary", "method", "recompute_ratio"})
        if doubled:
            raise ConfigurationError(f"{', '.join(doubled)} in engine_kwargs: set the model's own field instead.")
        own = {name: getattr(self, name) for name in _OWN}
        return EngineConfig.from_options(None, {"primary": self.model_name, **own, **self.engine_kwargs})

    def _full_config(self) -> EngineConfig:
        return replace(self._engine_config(), method=self.method, recompute_ratio=self.recompute_ratio)

    @property
    def engine(self) -> CacheClipEngine:
        """The process's engine for these settings; use it to ``precompute`` documents."""
        from cacheclip_rag import get_engine

        return get_engine(self._engine_config())

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of ``text`` in the primary's own tokenizer; loads the model."""
        return list(self.engine.primary.tokenize(text).ids)

    # -- LangChain's four calls ---------------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self._bind("generate", messages, stop, kwargs)())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(await asyncio.to_thread(self._bind("generate", messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for chunk in self._chunks(self._bind("generate_stream", messages, stop, kwargs)):
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
        events = self._bind("generate_stream", messages, stop, kwargs)
        async for chunk in iterate_in_thread(lambda: self._chunks(events)):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    # -- the engine's two calls ---------------------------------------------------------------------------------

    def _bind(
        self, call: str, messages: Sequence[BaseMessage], stop: list[str] | None, options: dict[str, Any]
    ) -> Callable[[], Any]:
        """The engine's call, ready to run: everything is checked now, the engine is touched where it is run."""
        options = {name: value for name, value in options.items() if name != "stream"}
        candidates = _document_texts(options.pop("documents", None) or ())
        if stop is not None:
            options["stop"] = stop
        settings = merge_call_options(self._call_settings(), options)
        prompt = _messages(messages)
        return lambda: getattr(self.engine, call)(prompt, **settings, candidates=candidates)

    def _call_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*_SAMPLING, "method", "recompute_ratio")}

    # -- answers as LangChain has them --------------------------------------------------------------------------

    def _result(self, answer: Answer) -> ChatResult:
        metadata = {"model_name": self.model_name, **_ending(answer)}
        message = AIMessage(content=answer.text, response_metadata=metadata, usage_metadata=_usage(answer))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunks(self, events: Callable[[], Iterator[StreamEvent]]) -> Iterator[ChatGenerationChunk]:
        """Chunks add up: what must not be added twice is on the first (name) or on the last (counts) only."""
        metadata: dict[str, Any] = {"model_name": self.model_name}
        for event in events():
            message = AIMessageChunk(content=event.text, response_metadata=metadata)
            if event.answer:
                message.response_metadata = {**metadata, **_ending(event.answer)}
                message.usage_metadata = _usage(event.answer)
                message.chunk_position = "last"
            yield ChatGenerationChunk(message=message)
            metadata = {}


def _ending(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "cacheclip": answer.stats.to_dict()}


def _usage(answer: Answer) -> UsageMetadata:
    prompt, completion = answer.stats.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=completion,
        total_tokens=prompt + completion,
        input_token_details=InputTokenDetails(cache_read=answer.stats.reused_tokens),
    )


def _messages(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    """Messages as the engine takes them. Raises ConfigurationError for tool messages and for content without text."""
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: BaseMessage) -> str:
    kind = message.type.removesuffix("MessageChunk").lower()
    if kind == "chat" and getattr(message, "role", None) in _ROLES.values():
        return str(message.role)  # type: ignore[attr-defined]
    if kind not in _ROLES or getattr(message, "tool_calls", None):
        raise ConfigurationError(
            f"ChatCacheClip takes system, human and AI messages, got a {message.type!r} message"
            f"{' with tool calls' if kind in _ROLES else ''}. Tool calling is not "
            "supported: give the tool's result as a human message."
        )
    return _ROLES[kind]


def _content(message: BaseMessage) -> str:
    text = str(message.text)
    if message.content and not text:
        raise ConfigurationError(f"ChatCacheClip reads text only, got a {message.type} message without any.")
    return text


def _document_texts(documents: Iterable[Document | str] | Document | str) -> list[str]:
    """The texts of ``documents``, blank ones left out. Raises ConfigurationError for anything else."""
    documents = [documents] if isinstance(documents, Document | str) else list(documents)
    for document in documents:
        if not isinstance(document, Document | str):
            raise ConfigurationError(f"documents must be Documents or strings, got {type(document).__name__}.")
    texts = [d if isinstance(d, str) else d.page_content for d in documents]
    return [text for text in texts if text.strip()]
