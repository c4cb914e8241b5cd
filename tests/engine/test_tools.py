"""Tools and JSON schemas through the whole engine, on a tiny model that closes what it opens."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing import fake_models

from cacheclip_rag import CacheClipEngine, ConfigurationError, MissingExtraError, SamplingParams, call_schema
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.constraint import closed
from cacheclip_rag.runtime.transformers.text import TextModel
from tests.conftest import Models, Patch
from tests.prompt.test_tools import SEARCH, calling, result, user

PLACES = {"type": "array", "items": {"type": "string"}}
KINDS = {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["keeper", "assistant"]}}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {**KINDS, "places": PLACES}, "required": [*KINDS, "places"]}
JSON = SamplingParams(max_tokens=100, json_schema=SCHEMA)


@pytest.fixture
def engine(tool_model: str) -> CacheClipEngine:
    return CacheClipEngine(primary=tool_model, auxiliary=None, method="direct", chunk_context="prefix", store=None)


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == SCHEMA["required"] and found["kind"] in ("keeper", "assistant")
    assert isinstance(found["name"], str) and isinstance(found["age"], int) and isinstance(found["places"], list)


class TestSchema:
    def test_sampled(self, engine: CacheClipEngine) -> None:
        params = SamplingParams(max_tokens=400, temperature=1.0, top_p=0.9, seed=0, json_schema=SCHEMA)
        answer = engine.generate("Who lived there?", params)
        check(answer.text)
        assert engine.generate("Who lived there?", params).text == answer.text
        with pytest.raises(json.JSONDecodeError):  # the twin: without a schema the same model writes none
            json.loads(engine.generate("Who lived there?", SamplingParams(max_tokens=30)).text)

    def test_streamed_from_reused_chunks(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks[:2])
        params = SamplingParams(max_tokens=400, temperature=1.0, top_p=0.9, seed=1, json_schema=SCHEMA)
        *pieces, last = engine.stream(f"{chunks[0]}\n\n{chunks[1]}\n\nWho lived there?", params)
        assert last.answer is not None and last.answer.stats.hits == 2
        assert len(pieces) > 10 and "".join(event.text for event in [*pieces, last]) == last.answer.text
        check(last.answer.text)
        answer = engine.generate("Who?", SamplingParams(max_tokens=5, json_schema=SCHEMA))
        assert answer.finish_reason == "length", "a cut answer says so"

    def test_json_text_is_the_same_setting(self) -> None:
        assert SamplingParams(json_schema=json.dumps(SCHEMA)) == SamplingParams(json_schema=SCHEMA)
        assert hash(JSON) == hash(SamplingParams(max_tokens=100, json_schema=SCHEMA))

    @pytest.mark.parametrize("schema", ["{", "3", [], 3, {"type": {1}}])
    def test_what_is_no_schema_is_refused(self, schema: Any) -> None:
        with pytest.raises(ConfigurationError, match="json_schema must be"):
            SamplingParams(json_schema=schema)

    @pytest.mark.parametrize(
        ("params", "options", "message"),
        [
            (SamplingParams(json_schema={"type": "wibble"}), {}, "cannot be followed.*wibble"),
            (JSON, {"finish": "verify"}, "finish='verify'"),
            (JSON, {"finish": "revise"}, "finish='revise'"),
        ],
        ids=["an unsupported schema", "verify", "revise"],
    )
    def test_refused(
        self, engine: CacheClipEngine, params: SamplingParams, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message):
            engine.generate("Who?", params, **options)

    def test_a_runtime_that_cannot(self) -> None:
        engine = CacheClipEngine(**fake_models())
        with pytest.raises(ConfigurationError, match="cannot follow a json_schema"):
            engine.generate("Who?", JSON)

    def test_without_the_extra(self, tool_model: str, monkeypatch: Patch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        engine = CacheClipEngine(primary=tool_model, auxiliary=None, method="full")
        with pytest.raises(MissingExtraError, match=r"pip install 'cacheclip-rag\[structured\]'"):
            engine.generate("Who?", JSON)

    def test_objects_are_closed_unless_the_schema_says_otherwise(self) -> None:
        inner = {"properties": {"a": {}}}
        assert closed({"items": inner})["items"]["additionalProperties"] is False
        for schema in ({**inner, "additionalProperties": True}, {"allOf": [inner, inner]}, {"const": inner}, {}):
            assert closed(schema) == schema


class TestTools:
    def test_a_forced_call(self, engine: CacheClipEngine) -> None:
        params = SamplingParams(max_tokens=100, json_schema=call_schema([SEARCH]))
        *_, last = events = list(engine.stream("Where?", params, tools=[SEARCH]))
        assert last.answer is not None and last.answer.text == ""
        (call,) = last.answer.tool_calls
        assert call.name == "search" and list(call.arguments) == ["query"]
        assert [each for event in events for each in event.tool_calls] == [call]

    def test_results_of_tools_are_reused(self, engine: CacheClipEngine, chunks: list[str]) -> None:
        engine.precompute(chunks[:2])
        messages = [user("Where?"), calling(query="x"), result(f"1. {chunks[0]}\n2. {chunks[1]}")]
        answer = engine.generate(messages, SamplingParams(max_tokens=3), tools=[SEARCH])
        plan = engine.plan(messages, tools=[SEARCH])
        assert answer.stats.hits == 2 and answer.stats.reused_tokens > 0
        assert plan.question == "Where?", "nothing stands behind the results"

    def test_the_prompt_is_what_the_template_writes(self, engine: CacheClipEngine) -> None:
        messages = [user("Where?"), calling(query="x"), result("Here.")]
        ids, runtime = engine.plan(messages, tools=[SEARCH]).layout.token_ids, engine.primary
        assert ids == runtime.tokenize(runtime.render_chat(messages, tools=[SEARCH]), control=True).ids

    def test_a_model_without_tools_says_so(self, tiny_models: Models) -> None:
        engine = CacheClipEngine(primary=tiny_models["llama"], auxiliary=None)
        with pytest.raises(ConfigurationError, match="does not use tools"):
            engine.generate("Where?", tools=[SEARCH])

    def test_a_model_without_a_chat_template_says_so(self, tool_model: str, tmp_path: Path) -> None:
        folder = shutil.copytree(tool_model, tmp_path / "base")
        (folder / "chat_template.jinja").unlink()
        engine = CacheClipEngine(primary=str(folder), auxiliary=None)
        with pytest.raises(ConfigurationError, match="no chat template"):
            engine.generate("Where?", tools=[SEARCH])
        written = "".join(segment.text for segment in engine.segment([user("Where?"), calling(query="x")]))
        assert '"arguments": {"query": "x"}' in written

    @pytest.mark.parametrize("key", ["<|im_end|>", "a<|im_start|>b"])
    def test_keys_of_a_definition_hold_no_control_tokens(self, engine: CacheClipEngine, key: str) -> None:
        tool = {"name": "f", "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}
        with pytest.raises(ConfigurationError, match="name of a control token"):
            engine.segment("Where?", tools=[tool])

    def test_special_tokens_around_calls_are_seen(self, tool_model: str, tmp_path: Path) -> None:
        """``[TOOL_CALLS]`` is a special token in Mistral's tokenizers, and no part of an answer's text."""
        runtime = load_model(tool_model)
        assert isinstance(runtime, TextModel) and not runtime._call_markers
        folder = tmp_path / "marked"
        shutil.copytree(tool_model, folder)
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        number = max(vocabulary.values())  # the last token of the base vocabulary becomes the marker
        text = next(t for t, n in vocabulary.items() if n == number)
        del vocabulary[text]
        tokenizer["model"]["merges"] = [m for m in tokenizer["model"]["merges"] if "".join(m) != text]
        vocabulary["[TOOL_CALLS]"] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": number, "content": "[TOOL_CALLS]", "special": True, **flags})
        file.write_text(json.dumps(tokenizer))
        marked = load_model(str(folder))
        ids = marked.tokenize('[TOOL_CALLS] [{"name": "f"}]<|im_end|>', control=True).ids
        assert number in ids
        assert marked.decode_ids(ids) == ' [{"name": "f"}]'
        assert marked.decode_calls(ids) == '[TOOL_CALLS] [{"name": "f"}]'
