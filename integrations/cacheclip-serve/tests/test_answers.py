"""Answers over HTTP are the engine's own, through the clients that people use."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from cacheclip_testing.plugin import CHUNKS, QUESTION, rag_prompt
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from serve_cases import NAME, Served, running
from transformers import AutoModelForCausalLM

from cacheclip_rag import EngineConfig

PROMPT = rag_prompt(CHUNKS)
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
WORDS = {"type": "object", "properties": {"words": {"type": "string"}}, "required": ["words"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Looks up.", "parameters": WORDS}}


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    served.engine.precompute(CHUNKS)
    return OpenAI(base_url=served.url, api_key="unused", max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    own: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**{**own, **fields})


class TestOpenAI:
    def test_an_answer_is_the_engines_own(self, served: Served, client: OpenAI) -> None:
        answer = served.engine.generate(MESSAGES, max_tokens=12)
        said = ask(client)
        assert said.choices[0].message.content == answer.text != ""
        assert said.choices[0].finish_reason == answer.finish_reason == "length"
        assert said.object == "chat.completion" and said.model == NAME
        usage = said.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (answer.stats.prompt_tokens, len(answer.token_ids))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    def test_stored_chunks_are_found_in_messages(self, served: Served, client: OpenAI) -> None:
        served.engine.prefixes.clear()
        said = ask(client)
        stats = said.cacheclip
        assert stats["hits"] == len(CHUNKS) and stats["misses"] == 0 and stats["method"] == "cacheclip"
        assert stats["chunk_tokens"] > stats["recomputed_tokens"] > 0
        cached = said.usage.prompt_tokens_details.cached_tokens
        assert cached == stats["reused_tokens"]
        assert cached == stats["prefix_tokens"] + stats["chunk_tokens"] - stats["recomputed_tokens"]
        assert set(stats) == set(served.engine.generate(MESSAGES, max_tokens=1).stats.to_dict())

    def test_a_stream_is_the_same_answer(self, client: OpenAI) -> None:
        whole = ask(client)
        chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
        assert "".join(texts) == whole.choices[0].message.content and len([t for t in texts if t]) > 3
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )
        assert chunks[-1].cacheclip["prompt_tokens"] == whole.usage.prompt_tokens
        assert all(chunk.usage is None and "cacheclip" not in chunk.model_extra for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1

    def test_a_completion_reads_the_prompt_as_it_stands(self, served: Served, client: OpenAI) -> None:
        served.engine.prefixes.clear()
        said: Any = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, temperature=0)
        segments = served.engine.segment(PROMPT)
        begin, end = segments.index(next(s for s in segments if not s.control)), len(segments)
        while segments[end - 1].control:
            end -= 1
        raw = served.engine.generate(segments[begin:end], max_tokens=8)
        assert said.choices[0].text == raw.text
        assert said.usage.prompt_tokens == raw.stats.prompt_tokens
        assert said.cacheclip["hits"] == len(CHUNKS)
        plain = served.engine.primary.tokenize(PROMPT).ids
        assert said.usage.prompt_tokens == len(plain), "no template around it"
        streamed = client.completions.create(model=NAME, prompt=[PROMPT], max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == raw.text

    def test_sixteen_tokens_complete_a_prompt(self, client: OpenAI) -> None:
        said = client.completions.create(model=NAME, prompt="The harbour", temperature=0)
        assert said.usage is not None and 0 < said.usage.completion_tokens <= 16

    def test_sampling(self, served: Served, client: OpenAI) -> None:
        options: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "seed": 7}
        answer = served.engine.generate(MESSAGES, max_tokens=12, **options)
        assert ask(client, **options).choices[0].message.content == answer.text
        assert ask(client, temperature=1.5, seed=8).choices[0].message.content != answer.text

    def test_temperature_is_one_unless_stated(self, served: Served, client: OpenAI) -> None:
        said = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=12, seed=7)
        answer = served.engine.generate(MESSAGES, max_tokens=12, temperature=1.0, seed=7)
        assert said.choices[0].message.content == answer.text

    def test_roles_and_parts(self, served: Served, client: OpenAI) -> None:
        messages: list[Any] = [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": CHUNKS[0]}, {"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": "I look.", "refusal": None, "annotations": []},
            {"role": "user", "content": "Go on."},
        ]
        same = [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": f"{CHUNKS[0]}\n{QUESTION}"},
            {"role": "assistant", "content": "I look."},
            {"role": "user", "content": "Go on."},
        ]
        said = ask(client, messages=messages)
        assert said.choices[0].message.content == served.engine.generate(same, max_tokens=12).text
        assert said.cacheclip["hits"] == 1

    HARMLESS: ClassVar[dict[str, dict[str, Any]]] = {
        "OpenAI's": {"user": "somebody", "metadata": {"a": "b"}, "store": False, "n": 1, "service_tier": "auto"},
        "neutral": {"min_p": 0, "logprobs": False, "logit_bias": {}, "functions": [], "new_field": {}},
        "Ollama's": {"num_ctx": 8192, "keep_alive": "5m", "options": {"num_ctx": 4096, "num_gpu": 1, "tfs_z": 1.0}},
        "llama.cpp's": {
            **{"timings_per_token": True, "reasoning_format": "auto", "samplers": "", "n_predict": -1, "typ_p": 1},
            **{"dry_multiplier": 0, "dry_base": 1.75, "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64},
        },
        "LiteLLM's": {"litellm_metadata": {"a": "b"}, "fallbacks": ["x"], "cache": {"a": 1}, "litellm_call_id": "x"},
        "Open WebUI's": {"chat_id": "a", "id": "c", "user": {"name": "A"}, "features": {"x": True}, "params": {}},
        "n8n's and Mistral's": {"maxRetries": 2, "timeout": 60_000, "safe_prompt": False},
        "vLLM's": {"return_token_ids": False, "priority": 1, "bad_words": [], "stop_token_ids": [], "min_tokens": 0},
    }

    @pytest.mark.some(3)
    @pytest.mark.parametrize("kind", HARMLESS)
    def test_harmless_fields_are_ignored(self, served: Served, client: OpenAI, kind: str) -> None:
        """And counted, under names that no client makes up."""
        fields = self.HARMLESS[kind]
        said = ask(client, extra_body=fields).choices[0].message.content
        assert said == ask(client).choices[0].message.content
        counted = served.client.get("/metrics").text
        for name in fields.keys() - {"n", "logprobs"}:
            is_known = name not in ("new_field", "samplers", "bad_words", "stop_token_ids", "params")
            assert (f'field="{name}"' in counted) is is_known, name
        assert served.chat(**{'x"}\n': []}).status_code == 200
        counted = served.client.get("/metrics").text
        assert 'field="other"' in counted and '{field="x"' not in counted

    @pytest.mark.some(2)
    @pytest.mark.parametrize(("options", "count"), [({}, 0), ({"temperature": 1.5, "seed": 7, "top_k": 3}, 3)])
    def test_logprobs(self, served: Served, client: OpenAI, options: dict[str, Any], count: int) -> None:
        """As one full prefill of prompt and answer has them, whatever the sampling."""
        given: dict[str, Any] = {"extra_body": {"cacheclip": {"method": "full"}}, **options}
        if top_k := given.pop("top_k", None):
            given["extra_body"]["top_k"] = top_k
        answer = served.engine.generate(MESSAGES, max_tokens=12, method="full", **options)
        said = ask(client, logprobs=True, top_logprobs=count, **given).choices[0]
        encoded = b"".join(bytes(each.bytes) for each in said.logprobs.content)
        assert said.message.content == answer.text == encoded.decode(errors="replace")
        runtime = served.engine.primary
        prompt = served.engine.plan(MESSAGES, method="full").layout.ids
        reference = AutoModelForCausalLM.from_pretrained(served.engine.config.primary)
        for number, (each, token) in enumerate(zip(said.logprobs.content, answer.token_ids, strict=True)):
            ids = torch.cat((prompt, torch.tensor(answer.token_ids[:number], dtype=prompt.dtype)))
            row = reference(input_ids=ids[None]).logits[0, -1].detach().log_softmax(-1)
            assert each.logprob == pytest.approx(float(row[token]), abs=1e-3)
            likeliest = row.topk(count)
            assert [other.logprob for other in each.top_logprobs] == pytest.approx(likeliest.values.tolist(), abs=1e-3)
            for other, number in zip(each.top_logprobs, likeliest.indices.tolist(), strict=True):
                name = runtime.tokenizer.added_tokens_decoder.get(number)
                assert other.token == (name.content if name else runtime.decode_ids([number]))
                assert bytes(other.bytes).decode(errors="replace") == other.token
        streamed = list(ask(client, logprobs=True, top_logprobs=count, stream=True, **given))
        assert [each for chunk in streamed if (found := chunk.choices[0].logprobs) for each in found.content] == [
            *said.logprobs.content
        ]
        assert ask(client, **given).choices[0].logprobs is None


class TestSeveral:
    """Lists of prompts, and several answers to one."""

    PROMPTS = ("The harbour", PROMPT, "A river")

    def test_a_list_of_prompts(self, served: Served, client: OpenAI) -> None:
        said: Any = client.completions.create(model=NAME, prompt=list(self.PROMPTS), max_tokens=6, temperature=0)
        alone: list[Any] = [
            client.completions.create(model=NAME, prompt=prompt, max_tokens=6, temperature=0) for prompt in self.PROMPTS
        ]
        assert [choice.text for choice in said.choices] == [each.choices[0].text for each in alone]
        assert len({choice.text for choice in said.choices}) == 3
        assert [choice.index for choice in said.choices] == [0, 1, 2]
        assert [choice.finish_reason for choice in said.choices] == [each.choices[0].finish_reason for each in alone]
        assert said.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in alone)
        assert said.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
        assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
        own = [choice.cacheclip for choice in said.choices]
        assert [each["prompt_tokens"] for each in own] == [each.usage.prompt_tokens for each in alone]
        assert [each["hits"] for each in own] == [0, len(CHUNKS), 0]
        cached = sum(each["reused_tokens"] for each in own)
        assert said.usage.prompt_tokens_details.cached_tokens == cached
        assert [each["queued_s"] for each in own] == sorted(each["queued_s"] for each in own), "earlier answers count"

    @pytest.mark.parametrize("seed", [7, 2**63 - 1])
    def test_several_answers_to_a_chat(self, served: Served, client: OpenAI, seed: int) -> None:
        seeds = [seed, *((seed + number + 2**63) % 2**64 - 2**63 for number in (1, 2))]
        said = ask(client, n=3, temperature=1.5, seed=seed)
        alone = [ask(client, temperature=1.5, seed=each) for each in seeds]
        texts = [choice.message.content for choice in said.choices]
        assert texts == [each.choices[0].message.content for each in alone] and len(set(texts)) == 3
        assert [choice.index for choice in said.choices] == [0, 1, 2]
        assert said.usage.prompt_tokens == alone[0].usage.prompt_tokens, "a prompt counts once"
        assert said.usage.completion_tokens == sum(each.usage.completion_tokens for each in alone)
        cached = said.choices[0].cacheclip["reused_tokens"]
        assert said.usage.prompt_tokens_details.cached_tokens == cached


class TestTools:
    def test_a_forced_call(self, client: OpenAI) -> None:
        choice = {"type": "function", "function": {"name": "search"}}
        said = ask(client, tools=[TOOL], tool_choice=choice, max_tokens=200)
        (call,) = said.choices[0].message.tool_calls
        assert call.function.name == "search" and set(json.loads(call.function.arguments)) == {"words"}
        assert said.choices[0].finish_reason == "tool_calls" and said.choices[0].message.content is None

    def test_in_a_stream(self, client: OpenAI) -> None:
        whole = ask(client, tools=[TOOL], tool_choice="required", max_tokens=200)
        chunks = list(ask(client, tools=[TOOL], tool_choice="required", max_tokens=200, stream=True))
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert call.index == 0 and call.type == "function"
        assert call.function.arguments == whole.choices[0].message.tool_calls[0].function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    def test_the_result_goes_back(self, served: Served, client: OpenAI) -> None:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": '{"words": "x"}'}}
        messages = [
            {"role": "user", "content": "Search."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": CHUNKS[0]},
        ]
        said = ask(client, messages=messages, tools=[TOOL], tool_choice="auto")
        own = [{**message, "content": message["content"] or ""} for message in messages]
        assert said.choices[0].message.content == served.engine.generate(own, max_tokens=12, tools=[TOOL]).text
        assert said.cacheclip["hits"] == 1, "what a tool returned is found like everything else"

    def test_a_schema_is_followed(self, client: OpenAI) -> None:
        schema = {"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "year", "schema": schema, "strict": True}}
        said = ask(client, response_format=wanted, max_tokens=200)
        assert isinstance(json.loads(said.choices[0].message.content)["year"], int)

    def test_any_object(self, client: OpenAI) -> None:
        said = ask(client, response_format={"type": "json_object"}, max_tokens=200)
        assert said.choices[0].message.content.startswith("{")


class TestField:
    """The field ``cacheclip``."""

    def test_it_says_how(self, client: OpenAI) -> None:
        said = ask(client, extra_body={"cacheclip": {"method": "direct", "question": QUESTION}})
        assert said.cacheclip["method"] == "direct" and said.cacheclip["recomputed_tokens"] == 0

    def test_a_trace(self, client: OpenAI) -> None:
        trace = ask(client, extra_body={"cacheclip": {"trace": True}}).cacheclip["trace"]
        assert [each["is_stored"] for each in trace["texts"]] == [True] * len(CHUNKS)
        assert not [each for each in trace["texts"] if {"text", "sources"} & {*each}], "a prompt may have a part only"

    def test_a_confidence(self, client: OpenAI) -> None:
        unsure = ask(client, extra_body={"cacheclip": {"ratio": 0.1, "min_confidence": 1.0}}).cacheclip
        assert unsure["gated"] is True and unsure["nominal_ratio"] == 0.1

    def test_a_confidence_is_not_below_the_servers(self, config: EngineConfig) -> None:
        strict = replace(config, store=None, min_confidence=1.0)
        with running(strict) as served:
            served.engine.precompute(CHUNKS)
            asking = OpenAI(base_url=served.url, api_key="unused", max_retries=0)
            for method in ("direct", "cacheclip-gated"):
                served.engine.prefixes.clear()
                said = ask(asking, extra_body={"cacheclip": {"method": method, "min_confidence": 0.0}}).cacheclip
                assert said["gated"] is True, said

    def test_finish(self, served: Served, client: OpenAI) -> None:
        served.engine.prefixes.clear()
        revised = list(ask(client, stream=True, extra_body={"cacheclip": {"finish": "revise"}}))
        full = served.engine.generate(MESSAGES, max_tokens=12, method="full").text
        assert "".join(chunk.choices[0].delta.content or "" for chunk in revised) == full
        assert revised[-1].cacheclip["verified_tokens"] is not None


class TestFrameworks:
    """Frameworks' own clients of OpenAI work by another address."""

    def test_langchain(self, served: Served, client: OpenAI) -> None:
        from langchain_openai import ChatOpenAI

        llm = ChatOpenAI(base_url=served.url, api_key="unused", model=NAME, temperature=0, max_tokens=12)  # type: ignore[call-arg, arg-type]
        expected = served.engine.generate(MESSAGES, max_tokens=12).text
        said = llm.invoke(PROMPT)
        assert said.content == expected
        assert said.usage_metadata is not None and said.usage_metadata["input_token_details"]["cache_read"] > 0
        assert "".join(str(chunk.content) for chunk in llm.stream(PROMPT)) == expected
        bound = llm.bind_tools([TOOL], tool_choice="search").bind(max_tokens=200)
        assert bound.invoke(PROMPT).tool_calls[0]["name"] == "search"


class TestOtherPaths:
    def test_models(self, served: Served, client: OpenAI) -> None:
        (found,) = client.models.list().data
        assert found.id == NAME and client.models.retrieve(NAME).id == NAME
        assert found.model_extra is not None
        assert found.model_extra["max_model_len"] == served.engine.primary.context_tokens
        assert found.model_extra["cacheclip"] == {"uses_tools": True, "can_constrain": True}

    def test_metrics(self, served: Served, client: OpenAI) -> None:
        def read() -> dict[str, float]:
            text = served.client.get("/metrics").text
            found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            return {sample.name + "".join(sorted(sample.labels.values())): sample.value for sample in found}

        before = read()
        ask(client)
        after = read()
        path = "cacheclip_http_requests_total" + "".join(sorted(["/v1/chat/completions", "200"]))
        assert after[path] == before.get(path, 0) + 1
        hits = "cacheclip_chunk_hits_total"
        assert after[hits] == before.get(hits, 0) + len(CHUNKS)
        while read()["cacheclip_questions_running"]:  # an answer has its place until what was missing is stored
            pass
        assert read()["cacheclip_questions_waiting"] == 0
