"""``cacheclip serve --backend vllm`` as a process: vLLM's own server, asked by OpenAI's client."""

from __future__ import annotations

import html
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cacheclip_testing import SENTENCES
from cacheclip_vllm.planner import Planner
from openai import AuthenticationError, OpenAI
from serve_cases import play
from vllm_engines import CHUNKS, PROMPTS, TOKENS, Setting, ask, gone, greedy, started

from cacheclip_rag import CacheClipEngine, CallOptions, PromptTooLongError, SamplingParams
from cacheclip_rag.adapters import RemoteEngine
from cacheclip_rag.methods import preset
from cacheclip_rag.planning import FusionPlan

KEY, NORTH, SOUTH = "server-key-1", "north-key-11", "south-key-11"
FLAGS = [
    *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32", "--seed", "0"),
    *("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
]
NORTH_OR_SOUTH = {"words": {"type": "string", "enum": ["north", "south"]}}
WORDS = {"type": "object", "properties": NORTH_OR_SOUTH, "required": ["words"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "search", "parameters": WORDS}}


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str
    log: Path

    def client(self, key: str = KEY) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0)

    def chat(self, messages: Any, key: str = KEY, field: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Ask; greedy, and never the end of a turn."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {"ignore_eos": True, "return_token_ids": True, **({"cacheclip": field} if field else {})}
        given = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": TOKENS, **fields}
        return self.client(key).chat.completions.create(**given, extra_body=body)

    def forget(self) -> None:
        """Empty vLLM's prefix cache: exact KV of earlier requests would be taken first."""
        assert self.post("/reset_prefix_cache").status_code == 200

    def get(self, path: str, key: str = KEY) -> httpx.Response:
        return httpx.get(f"{self.address}{path}", headers={"authorization": f"Bearer {key}"}, timeout=60)

    def post(self, path: str, key: str = KEY, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.address}{path}", headers=headers, json=body, timeout=60)


@pytest.fixture(scope="module")
def setting(settings: Any) -> Setting:
    return settings("tools")


@pytest.fixture(scope="module")
def offline(setting: Setting) -> list[tuple[int, ...]]:
    """Answers of the offline class."""
    with started(setting) as fused:
        return ask(fused, PROMPTS, "cacheclip")


@pytest.fixture(scope="module")
def without_us(setting: Setting) -> dict[str, Any]:
    """Token ids and log probabilities of the first prompt by a vLLM that knows nothing of us."""
    from vllm import LLM, SamplingParams as Sampling
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {"max_model_len": 1024, "max_num_seqs": 16, "block_size": 32, "seed": 0, "disable_log_stats": True}
    llm = LLM(setting.model, dtype="float32", enforce_eager=True, **options)
    try:
        params = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
        (found,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        tokens = list(found.outputs[0].token_ids)
        each = zip(tokens, found.outputs[0].logprobs, strict=True)
        return {"tokens": tokens, "logprobs": [at[token].logprob for token, at in each]}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def served(
    setting: Setting, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The server. It starts beside the engines that it is compared with."""

    def meanwhile() -> None:
        request.getfixturevalue("offline"), request.getfixturevalue("without_us")

    with serving(setting, tmp_path_factory.mktemp("server"), "--inspect", meanwhile=meanwhile) as found:
        yield found


@contextmanager
def serving(
    setting: Setting, folder: Path, *ours: str, shadow_rate: float = 0.0, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[Served]:
    """A server with further options of ours. ``meanwhile``: called while it starts."""
    tenants = folder / "tenants.json"
    tenants.write_text(json.dumps({NORTH: "north", SOUTH: "south"}))
    north(setting).precompute(CHUNKS[:3])
    own = f'chunk_context = "passages"\nshadow_rate = {shadow_rate}\n[serve]\nserved_name = "tiny"'
    (folder / "settings.toml").write_text(own)
    options = setting.options
    command = [
        *(sys.executable, "-c", "from cacheclip_rag.cli import main; main()", "serve", "--backend", "vllm"),
        *("--store", setting.store, "--primary", options["primary"], "--auxiliary", options["auxiliary"]),
        *("--method", "cacheclip", "--settings", str(folder / "settings.toml"), "--port", "0", "--json"),
        *("--tenants", str(tenants), *ours, "--", *FLAGS),
    ]
    environment = {**os.environ, "CACHECLIP_API_KEY": KEY, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
    log = (folder / "log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        meanwhile()
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()[-4000:]
        ready = json.loads(line)
        assert (ready["model"], ready["backend"]) == ("tiny", "vllm")
        for _ in range(100):  # it listens in a moment
            try:
                assert httpx.get(f"{ready['address']}/health").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield Served(process, ready["address"], folder / "log")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        log.close()
        assert process.stdout is not None
        process.stdout.close()
        print((folder / "log").read_text()[-6000:])


class TestEqualAnswers:
    @pytest.fixture(autouse=True)
    def _alone(self, served: Served) -> None:
        served.forget()

    def test_chats(self, served: Served, setting: Setting, offline: Any) -> None:
        expected = setting.expected(PROMPTS, "cacheclip")
        assert offline == expected != setting.expected(PROMPTS, "full")
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(served.chat, PROMPTS))
        assert [tuple(each.choices[0].token_ids) for each in found] == expected
        assert [each.cacheclip["outcome"] for each in found] == ["fused"] * 4
        for each in found:
            details = each.usage.prompt_tokens_details
            assert 1 <= each.usage.prompt_tokens - details.cached_tokens < 60
            assert each.cacheclip["hits"] == 4 and each.cacheclip["prompt_tokens"] == each.usage.prompt_tokens
            assert 0 < each.cacheclip["planning_s"] < each.cacheclip["ttft_s"]
            phases = each.cacheclip["phases_s"]
            assert phases["read"] > 0 < phases["recompute"] and sum(phases.values()) <= each.cacheclip["ttft_s"]
            assert each.kv_transfer_params is None and each.metrics is None
        again = served.chat(PROMPTS[0])
        assert again.cacheclip["outcome"] == "cached", "in vLLM's own cache, by the first answer"
        assert tuple(again.choices[0].token_ids) == expected[0]

    def test_the_page_of_an_answer(self, served: Served) -> None:
        found = served.chat(PROMPTS[0])
        (own,) = re.findall(r"answers of default: (\S+)", served.log.read_text())
        with httpx.Client(follow_redirects=True) as visitor:
            number = re.findall(r"/inspect/(\d+)", visitor.get(own).text)[0]
            page = visitor.get(f"{served.address}/inspect/{number}").text
        assert html.escape(found.choices[0].message.content) in page and CHUNKS[0][:30] in page
        tokens = sum(int(each.replace(",", "")) for each in re.findall(r"<td[^>]*>([\d,]+) / ", page))
        assert tokens == found.cacheclip["chunk_tokens"] and "computed again" in page

    async def test_the_requests_of_applications(self, served: Served) -> None:
        """Open WebUI's and LiteLLM's, which are planned and answered as they expect."""
        found = await play(served.address, CHUNKS[:2], KEY, max_tokens=4)
        assert len(found) == 8 and set(found.values()) == {2}

    def test_completions(self, served: Served, setting: Setting) -> None:
        segments = Planner(**setting.options).segments(PROMPTS[1], as_it_stands=True)
        (expected,) = setting.expected([segments], "cacheclip")
        fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": TOKENS}
        extra = {"ignore_eos": True, "return_token_ids": True}
        whole = served.client().completions.create(**fields, extra_body=extra)
        assert tuple(whole.choices[0].token_ids) == expected and whole.cacheclip["outcome"] == "fused"
        chunks = list(served.client().completions.create(**fields, stream=True, extra_body=extra))
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].cacheclip["outcome"] == "cached", "it is in vLLM's own cache now"

    @pytest.mark.parametrize("usage", [True, False])
    def test_a_stream(self, served: Served, setting: Setting, usage: bool) -> None:
        options = {"stream_options": {"include_usage": True}} if usage else {}
        chunks = list(served.chat(PROMPTS[2], stream=True, **options))
        (expected,) = setting.expected([PROMPTS[2]], "cacheclip")
        choices = [choice for chunk in chunks for choice in chunk.choices]
        ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or ()]
        assert tuple(ids) == expected and len(chunks) > 5
        own = chunks[-1].cacheclip
        assert own["outcome"] in ("fused", "cached") and own["generated_tokens"] == TOKENS and own["ttft_s"] > 0
        assert bool(chunks[-1].usage) == usage and not any(hasattr(chunk, "cacheclip") for chunk in chunks[:-1])

    def test_streams_say_what_whole_answers_say(self, served: Served, setting: Setting) -> None:
        """Of a plan that is new, of one that vLLM's own cache answers, and of one whose chunk is gone."""
        long = "Answer with the name of a person who came by sea, and with the year, in one short line. " * 2

        def asked(number: int, method: str) -> list[str]:
            """Outcomes of a stream, one with token counts, and a whole answer."""
            given: dict[str, Any] = {"messages": f"{PROMPTS[number]} {long}", "field": {"method": method}}
            streams = [{"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}]
            lasts = [list(served.chat(**given, **options))[-1] for options in streams]
            return [each.cacheclip["outcome"] for each in (*lasts, served.chat(**given))]

        assert asked(0, "direct") == ["fused", "cached", "cached"]
        assert served.chat(f"{PROMPTS[1]} {long}", field={"method": "direct"}).cacheclip["outcome"] == "fused"
        assert asked(1, "direct") == ["cached"] * 3
        fusion = setting.planner().plan(PROMPTS[2], method="direct").fusion
        assert fusion is not None
        with gone(setting, fusion.pieces[-1].key):
            served.forget()
            said = list(served.chat(PROMPTS[2], stream=True, field={"method": "direct"}))[-1].cacheclip
            assert (said["outcome"], said["cached_prefix_tokens"]) == ("plain", 0) and "log" in said["reason"]
            served.forget()
            again = served.chat(PROMPTS[2], field={"method": "direct"}).cacheclip
            assert (again["outcome"], again["hits"], again["misses"]) == ("fused", 3, 1), "it is missing now"
            assert "1 chunks of a plan could not be read and were removed" in served.log.read_text()

    def test_plain_requests_are_those_of_a_vllm_without_us(
        self, served: Served, setting: Setting, without_us: dict[str, Any]
    ) -> None:
        """After all the fused ones: their blocks are not found."""
        fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": TOKENS}
        extra = {"ignore_eos": True, "return_token_ids": True, "cacheclip": {"method": "full"}}
        found = served.client().completions.create(**fields, logprobs=1, extra_body=extra)
        assert list(found.choices[0].token_ids) == without_us["tokens"]
        assert found.choices[0].logprobs.token_logprobs == without_us["logprobs"]
        chats = [tuple(served.chat(each, field={"method": "full"}).choices[0].token_ids) for each in PROMPTS]
        assert chats == setting.expected(PROMPTS, "full")

    def test_methods_and_documents(self, served: Served, setting: Setting) -> None:
        found = served.chat(PROMPTS[3], field={"method": "epic", "ratio": 0.5, "documents": CHUNKS})
        assert tuple(found.choices[0].token_ids) == setting.expected([PROMPTS[3]], preset("epic").at(0.5))[0]
        assert found.cacheclip["nominal_ratio"] == 0.5 and found.cacheclip["not_found"] > 0
        new = f"{'It was never stored. ' * 9}\n\nWhat?"
        plain = served.chat(new, field={"documents": ["It was never stored. " * 9], "method": "epic-corrected"})
        assert (plain.cacheclip["outcome"], plain.cacheclip["misses"]) == ("plain", 1)

    def test_an_edited_prompt_takes_kv_of_the_earlier_one(self, served: Served, setting: Setting) -> None:
        """Whose tokens vLLM's own process kept; another tenant's prompt takes none of them."""
        words = sorted({*" ".join(SENTENCES).split()})
        texts = "\n\n".join(" ".join(random.Random(each).sample(words, 40)) for each in range(5))
        old, new = (f"Checksum {each}.\n\n{texts}\n\nQuestion: Where?" for each in ("a91f3", "07c2e, longer"))
        assert served.chat(old).cacheclip["outcome"] == "plain"
        stranger = served.chat(new, key=NORTH).cacheclip
        assert (stranger["outcome"], stranger.get("moved_tokens", 0)) == ("plain", 0)
        served.forget()
        found = served.chat(new)
        assert found.cacheclip["outcome"] == "fused" and found.cacheclip["moved_tokens"] > 150
        served.forget()
        exact = served.chat(new, field={"moved": "off"})
        assert (exact.cacheclip["outcome"], exact.cacheclip.get("moved_tokens", 0)) == ("plain", 0)
        assert tuple(exact.choices[0].token_ids) == setting.expected([new], "full")[0]

    def test_the_adapters_client(self, served: Served, setting: Setting) -> None:
        engine = RemoteEngine(f"{served.address}/v1", KEY)
        assert engine.served.uses_tools and engine.served.context_tokens == 1024
        *_, last = engine.stream(PROMPTS[0], options=CallOptions(SamplingParams(max_tokens=4), documents=CHUNKS))
        assert last.answer is not None and last.answer.stats.hits == 4 and last.answer.stats.method == "cacheclip"
        expected = setting.engine.generate(PROMPTS[0], max_tokens=4, temperature=0)
        assert last.answer.text and expected.text.startswith(last.answer.text)  # vLLM holds back half a character

    def test_the_next_turn_after_a_pause_is_plain(self, served: Served, setting: Setting) -> None:
        """It goes on from exact KV of the prompt and of its answer, which the server let vLLM compute meanwhile."""
        asked, done = "vllm:request_success_total", 0.0
        first = served.chat(PROMPTS[0], field={"finish": "idle"}, max_tokens=64)
        assert first.cacheclip["outcome"] == "fused"
        while done != (done := _metric(served, asked)):
            time.sleep(0.5)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        turns = [{"role": "user", "content": PROMPTS[0]}, said, {"role": "user", "content": "And who?"}]
        found = served.chat(turns)
        assert (found.cacheclip["outcome"], found.cacheclip["phases_s"]["select"]) == ("exact", 0), "nothing is scored"
        assert tuple(found.choices[0].token_ids) == setting.expected([turns], "full")[0]
        assert found.cacheclip["cached_prefix_tokens"] > first.usage.prompt_tokens

    def test_a_chat_model_of_langchain(self, served: Served, setting: Setting) -> None:
        from langchain_cacheclip import ChatCacheClip

        llm = ChatCacheClip(base_url=f"{served.address}/v1", api_key=KEY, temperature=0, max_tokens=TOKENS)
        asked = f"{PROMPTS[0]} Chat model."
        found = llm.invoke(asked)
        assert found.response_metadata["cacheclip"]["hits"] == 4
        assert found.response_metadata["cacheclip"]["method"] == "cacheclip"
        assert 400 < found.usage_metadata["input_token_details"]["cache_read"] < found.usage_metadata["input_tokens"]
        assert begins(found.content, setting, asked)

    def test_a_call_that_vllm_streams_in_pieces(self, served: Served) -> None:
        engine = RemoteEngine(f"{served.address}/v1", KEY)
        body = {
            **{"messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "max_tokens": 200},
            **{"stream": True, "stream_options": {"include_usage": True}},
            "tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "search"}},
        }
        *_, last = engine._events(body)
        assert last.answer is not None
        ((name, arguments),) = [(call.name, call.arguments) for call in last.answer.tool_calls]
        assert name == "search" and arguments["words"] in ("north", "south")


def begins(text: str, setting: Setting, asked: str) -> bool:
    """Whether a text is our engine's answer, of which vLLM holds back half a character at the end."""
    expected = setting.engine.generate(asked, max_tokens=TOKENS, temperature=0).text
    return len(text) >= len(expected) - 4 and expected.startswith(text)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": '{"words": "a \\"b\\""}'}}
CALLED, FOUND = {"role": "assistant", "tool_calls": [CALL]}, f"{CHUNKS[0]}\n{CHUNKS[3]}"
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": FOUND}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "system": ([{"role": "system", "content": " Be short.\n"}, user(PROMPTS[0])], {}),
    "one part": ([user([{"type": "text", "text": PROMPTS[0]}])], {}),
    "several turns": (
        [user(f"{PROMPTS[1]} "), {"role": "assistant", "content": "Yes, ünicode."}, user(CHUNKS[5])],
        {},
    ),
    "tools": ([user(PROMPTS[0])], {"tools": [TOOL]}),
    "a call and its result": ([user("Search."), {**CALLED, "content": ""}, RESULT], {"tools": [TOOL]}),
    "a call without a text": ([user("Search."), {**CALLED, "content": None}, RESULT], {"tools": [TOOL]}),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_planned_prompts_are_vllms_own(served: Served, name: str) -> None:
    """The ids that are planned are those that vLLM makes of the same messages."""
    messages, fields = CONVERSATIONS[name]
    fused = served.chat(messages, max_tokens=1, **fields)
    assert fused.cacheclip["outcome"] in ("fused", "cached", "exact"), fused.cacheclip
    plain = served.chat(messages, max_tokens=1, field={"method": "full"}, **fields)
    assert plain.cacheclip["outcome"] == "plain"
    assert fused.prompt_token_ids == plain.prompt_token_ids


BLOCKS = [
    user([{"type": "text", "text": CHUNKS[0]}, {"type": "text", "text": "Search."}]),
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a" * 9, "name": "search", "input": {"words": "a"}}]},
    user([{"type": "tool_result", "tool_use_id": "a" * 9, "content": f"{CHUNKS[3]}\n{CHUNKS[1]}"}]),
]
SAID = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": CHUNKS[0]}, {"type": "input_text", "text": "Search."}]},
    {"type": "function_call", "call_id": "abcdefghi", "name": "search", "arguments": '{"words": "a"}'},
    {"type": "function_call_output", "call_id": "abcdefghi", "output": f"{CHUNKS[3]}\n{CHUNKS[1]}"},
    {**SAID, "content": [{"type": "output_text", "text": "Yes, ünicode.", "annotations": []}]},
    user(CHUNKS[2]),
]
DEFINED = {"type": "function", "name": "search", "parameters": WORDS, "strict": True}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": ("/v1/messages", {"messages": [{"role": "user", "content": PROMPTS[0]}]}),
    "blocks": (
        "/v1/messages",
        {
            **{"system": [{"type": "text", "text": "Be"}, {"type": "text", "text": " short."}], "messages": BLOCKS},
            "tools": [{"name": "search", "description": "Finds.", "input_schema": WORDS}],
        },
    ),
    "an input": ("/v1/responses", {"input": PROMPTS[1], "instructions": "Be short."}),
    "items": ("/v1/responses", {"input": ITEMS, "tools": [DEFINED]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_planned_prompts_of_other_apis_are_vllms_own(served: Served, name: str) -> None:
    """In the blocks that vLLM leaves of its own prompt, the plan's ids are found, and there are as many."""
    path, body = OTHERS[name]
    body = {"model": "tiny", "temperature": 0, "max_tokens" if "messages" in path else "max_output_tokens": 4, **body}

    def said(**fields: Any) -> dict[str, Any]:
        response = served.post(path, **body, **fields)
        assert response.status_code == 200, response.text
        if "stream" not in fields:
            return dict(response.json()["cacheclip"])
        events = (json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {"))
        (last,) = (each for each in (each.get("response", each) for each in events) if "cacheclip" in each)
        return dict(last["cacheclip"])

    served.forget()
    plain, exact = said(cacheclip={"method": "full"}), said()
    assert plain["outcome"] == "plain" and exact["outcome"] == "exact", exact
    assert exact["prompt_tokens"] == plain["prompt_tokens"] > 128
    assert exact["cached_prefix_tokens"] == (plain["prompt_tokens"] - 1) // 32 * 32
    served.forget()
    fused, streamed = said(), said(stream=True)
    assert fused["outcome"] == "fused" and fused["hits"] > 1
    assert streamed["outcome"] in ("fused", "cached") and streamed["hits"] == fused["hits"]


class TestRefusals:
    def test_a_prompt_that_is_too_long_for_vllm(self, served: Served, setting: Setting) -> None:
        """The model's context has room for it."""
        asked = PROMPTS[0] * 3
        assert len(setting.planner().plan(asked, method="full").token_ids) > 1024
        engine, options = RemoteEngine(f"{served.address}/v1", KEY), CallOptions(SamplingParams(max_tokens=4))
        with pytest.raises(PromptTooLongError, match="1024"):
            list(engine.stream(asked, options=options))

    def test_a_wrong_key(self, served: Served) -> None:
        before = _metric(served, "cacheclip_outcomes_total")
        with pytest.raises(AuthenticationError):
            served.chat(PROMPTS[0], key="wrong-key-11")
        for path in ("/metrics", "/v1/models", "/version"):
            assert served.get(path, "wrong-key-11").status_code == 401
        assert served.get("/metrics", NORTH).status_code == 403
        assert _metric(served, "cacheclip_outcomes_total") == before

    def test_a_plan_of_a_client(self, served: Served, setting: Setting) -> None:
        """Past the middleware, by a path that it does not read: the connector refuses it."""
        fusion = setting.planner().plan(PROMPTS[0]).fusion
        assert isinstance(fusion, FusionPlan)
        carried = {"cacheclip": {"plan": fusion.to_dict()}, "prompt_token_ids": list(fusion.token_ids)}
        ids = carried.pop("prompt_token_ids")
        body = {"model": "tiny", "token_ids": ids, "sampling_params": {"max_tokens": 2}, "kv_transfer_params": carried}
        found = served.post("/inference/v1/generate", **body)
        assert found.status_code == 200, found.text
        said = found.json()["kv_transfer_params"]["cacheclip"]
        assert said == {"outcome": "plain", "reason": "the request was not planned by this server"}
        assert served.post("/inference/v1/generate", NORTH, **body).status_code == 403


class TestTenants:
    def test_each_has_its_own_chunks(self, served: Served, setting: Setting) -> None:
        found = served.chat(PROMPTS[0], key=NORTH)
        stats = setting.planner(namespace="north").plan(PROMPTS[0]).stats
        assert (found.cacheclip["outcome"], found.cacheclip["hits"]) == ("fused", stats.hits) and stats.hits > 2
        expected = greedy(north(setting), PROMPTS[0], "cacheclip")
        assert tuple(found.choices[0].token_ids) == expected != setting.expected(PROMPTS[:1], "cacheclip")[0]

    def test_none_finds_what_others_asked(self, served: Served, setting: Setting) -> None:
        """Neither fused nor plain."""
        own = served.chat(PROMPTS[0], field={"method": "full"})
        for again in (False, True):
            found = served.chat(PROMPTS[0], key=SOUTH)
            assert (found.cacheclip["outcome"], found.cacheclip["hits"]) == ("plain", 0)
            assert found.choices[0].token_ids == own.choices[0].token_ids
            cached = found.usage.prompt_tokens_details.cached_tokens
            assert (cached > 0) == again, "its own, the second time"


def north(setting: Setting) -> CacheClipEngine:
    return CacheClipEngine(**{**setting.options, "namespace": "north"})


def _metric(served: Served, name: str) -> float:
    lines = served.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_signal_lets_answers_end_and_stops_all_processes(served: Served) -> None:
    """The last test of this server: it is gone after it."""
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert children, "vLLM's engine has a process of its own"
    tokens = 400
    stream = served.chat(PROMPTS[0], stream=True, max_tokens=tokens)
    chunks = [next(stream) for _ in range(3)]
    served.process.send_signal(signal.SIGTERM)
    chunks += stream
    assert (chunks[-1].choices[0].finish_reason, chunks[-1].cacheclip["generated_tokens"]) == ("length", tokens)
    assert sum(len(getattr(choice, "token_ids", None) or ()) for each in chunks for choice in each.choices) == tokens
    assert served.process.wait(60) == 0
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    with pytest.raises(httpx.TransportError):
        served.get("/health")


def test_shadow_checks(setting: Setting, tmp_path: Path) -> None:
    """At ratio 1.0 nothing differs; without recompute, answers leave plain prefill's. No answer changes."""
    with serving(setting, tmp_path, shadow_rate=1.0) as served:
        count = 0

        def checked(stream: bool, method: str, ratio: float | None = None) -> list[tuple[int, ...]]:
            """Token ids of answers, each of which was compared before the next one."""
            nonlocal count
            found = []
            for each in PROMPTS:
                served.forget()  # the comparison left exact KV
                said = served.chat(each, stream=stream, field={"method": method, "ratio": ratio})
                choices = [c for chunk in said for c in chunk.choices] if stream else said.choices
                found.append(tuple(id for c in choices for id in getattr(c, "token_ids", None) or ()))
                count += 1
                end = time.monotonic() + 30
                while _metric(served, "cacheclip_shadow_checks_total") < count:
                    assert time.monotonic() < end, "it was not compared"
                    assert not _metric(served, "cacheclip_shadow_skipped_total")
                    time.sleep(0.05)
            return found

        def agreement() -> float:
            return _metric(served, "cacheclip_shadow_agreement_sum")

        full = setting.expected(PROMPTS, "full")
        for stream in (False, True):
            before = agreement()
            assert checked(stream, "cacheclip", 1.0) == full and agreement() == before + len(PROMPTS)
            assert checked(stream, "direct") == setting.expected(PROMPTS, "direct")
            assert before + 4 <= agreement() < before + 8
        assert _metric(served, "cacheclip_outcomes_total") == count == 16
        served.forget()
        served.chat(PROMPTS[0], temperature=0.7), served.chat(PROMPTS[0], field={"method": "full"})
        assert _metric(served, "cacheclip_shadow_checks_total") == count
