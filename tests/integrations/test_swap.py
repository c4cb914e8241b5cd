"""Nothing but the model is swapped: with nothing stored, answers are those of transformers for the same messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from langchain_cacheclip import ChatCacheClip
from langchain_core.messages import HumanMessage, SystemMessage
from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.cacheclip import CacheClipLLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.sampling import SamplingParams

SYSTEM, QUESTION = "Answer in one word.", "Where did the keeper of the lighthouse live?"


def expected(folder: str, **options: Any) -> str:
    """What a program with transformers alone answers, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    found = model.generate(**ids, max_new_tokens=24, do_sample=False, **options)
    return str(tokenizer.decode(found[0][ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.4}], ids=["greedy", "penalty"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_are_those_of_transformers(tiny_models: dict[str, str], name: str, options: dict[str, Any]) -> None:
    folder = tiny_models[name]
    given = {"model_name": folder, "auxiliary": None, "max_tokens": 24, **options}
    wanted = expected(folder, **options)
    assert wanted and wanted != expected(folder, **({} if options else {"repetition_penalty": 1.4}))
    chat = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]
    assert CacheClipLLM(**given).chat(chat).message.content == wanted
    assert ChatCacheClip(**given).invoke([SystemMessage(SYSTEM), HumanMessage(QUESTION)]).content == wanted


@pytest.mark.parametrize("adapter", [CacheClipLLM, ChatCacheClip])
def test_a_call_says_what_the_model_does_not(tiny_models: dict[str, str], adapter: type) -> None:
    llm = adapter(model_name=tiny_models["llama"], auxiliary=None, temperature=5.0, top_k=1, max_tokens=12)
    greedy = adapter(model_name=tiny_models["llama"], auxiliary=None, max_tokens=12)
    ask = (lambda m, **o: m.complete(QUESTION, **o).text) if adapter is CacheClipLLM else _invoked
    assert ask(llm) == ask(greedy) != ask(greedy, repetition_penalty=3.0)
    assert ask(greedy, repetition_penalty=3.0) == ask(llm, repetition_penalty=3.0)


def _invoked(llm: Any, **options: Any) -> str:
    return str(llm.invoke(QUESTION, **options).content)


def test_a_penalised_answer_is_not_held_against_full_prefills(tiny_models: dict[str, str]) -> None:
    """Its tokens are not the model's likeliest."""
    engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None, method="direct")
    chunks = ["The lamp burned whale oil until the year 1871.", "The keeper lived above the harbour office."]
    engine.precompute(chunks)
    params = SamplingParams(max_tokens=12, repetition_penalty=3.0)
    answer = engine.generate("\n\n".join([*chunks, QUESTION]), params, finish="revise")
    assert answer.stats.verified_tokens is None and answer.stats.diverged_at is None and len(answer.token_ids) == 12
    assert torch.tensor(answer.token_ids).unique().numel() > 6
