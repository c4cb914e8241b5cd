"""The text model, for base models and for chains that need a string."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from cacheclip_rag.adapters import answer_in_thread, iterate_in_thread, last_answer, token_usage

from .base import LangChainFields, ending

if TYPE_CHECKING:
    from cacheclip_rag import Answer, Event


class CacheClipLLM(LangChainFields, BaseLLM):
    """A local text model that reuses the precomputed KV of documents found in its prompts, like :class:`ChatCacheClip`.

    For a model with a chat template, the prompt is one user message. Fusion statistics are in
    ``generation_info["cacheclip"]``, reused tokens also in ``generation_info["gen_ai.usage.cache_read.input_tokens"]``.
    Calls accept the same options as the chat model's calls.

    Raises:
        ConfigurationError: an unknown field or call option, or a value out of range.
        PromptTooLongError: the prompt does not fit the model's context. The error is also LangChain's
            ``ContextOverflowError``.

    >>> CacheClipLLM(store="my-store").invoke("The Eiffel Tower is 330 metres tall.")
    """

    @property
    def _llm_type(self) -> str:
        return "cacheclip"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return False

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return self._results([last_answer(self._bind(prompt, stop, kwargs)()) for prompt in prompts])

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        calls = [self._bind(prompt, stop, kwargs) for prompt in prompts]
        return self._results([await answer_in_thread(call) for call in calls])

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        for chunk in _chunks(self._bind(prompt, stop, kwargs)):
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        events = self._bind(prompt, stop, kwargs)
        async for chunk in iterate_in_thread(lambda: _chunks(events)):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _results(self, answers: list[Answer]) -> LLMResult:
        counts = [token_usage(answer) for answer in answers]
        usage: dict[str, Any] = {
            name: sum(each[name] for each in counts) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in counts)
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return LLMResult(
            generations=[[Generation(text=answer.text, generation_info=ending(answer))] for answer in answers],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )


def _chunks(events: Callable[[], Iterator[Event]]) -> Iterator[GenerationChunk]:
    for event in events():
        yield GenerationChunk(text=event.text, generation_info=ending(event.answer) if event.answer else None)
