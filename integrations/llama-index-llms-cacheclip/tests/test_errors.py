"""LlamaIndex swallows no error of ours: it ends the call, or is logged where LlamaIndex goes on by design."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from adapter_cases import FEW, OTHERS, OURS, Town, in_loop, raised
from cacheclip_testing import fake_of
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.question_gen.types import SubQuestion
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.cacheclip import CacheClipLLM
from llama_index.response_synthesizers.cacheclip import CacheClipSynthesizer
from llama_index_cases import WordEmbedding

from cacheclip_rag import ConfigurationError
from cacheclip_rag.models.load import _registry, unload_models

MODES = [mode for mode in ResponseMode if mode not in ("no_text", "context_only")]


def nodes() -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=f"The harbour has {n} berths."), score=1.0) for n in range(3)]


async def adrain(response: Any) -> None:
    async for _ in response.async_response_gen():
        pass


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # of LlamaIndex's agents
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",  # its chat engines raise in their thread too
)
class TestLlamaIndex:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(
        ("mode", "options", "ours"),
        [
            *((mode, {}, mode in ("tree_summarize", "simple_summarize")) for mode in MODES),
            *((mode, {"output_cls": Town}, mode == "compact") for mode in MODES),
            *((mode, {"structured_answer_filtering": True}, False) for mode in ("refine", "compact")),  # alone have it
        ],
        ids=str,
    )
    def test_every_response_mode(self, llm: CacheClipLLM, mode: str, options: dict[str, Any], ours: bool) -> None:
        def synthesizer(streaming: bool) -> Any:
            make: Any = CacheClipSynthesizer if ours else get_response_synthesizer
            return make(llm=llm, response_mode=mode, streaming=streaming, **options)

        async def streamed() -> None:
            await adrain(await synthesizer(True).asynthesize("How many?", nodes()))

        ways: list[Callable[[], Any]] = [
            lambda: synthesizer(False).synthesize("How many?", nodes()),
            in_loop(lambda: synthesizer(False).asynthesize("How many?", nodes())),
        ]
        if mode not in ("accumulate", "compact_accumulate"):  # they cannot stream
            ways += [lambda: [*synthesizer(True).synthesize("How many?", nodes()).response_gen], in_loop(streamed)]
        assert llm.engine.primary
        if options:  # the first and the last way go through what they change
            ways = ways[::3]
        for error in (*OURS, *OTHERS) if mode == "compact" and not options else FEW[:2]:
            fake_of(llm.engine).error = error
            for way in ways:
                raised(error, way)

    def test_what_goes_on_by_design_logs(self, llm: CacheClipLLM, caplog: pytest.LogCaptureFixture) -> None:
        """The sub-question engine answers without the questions that fail."""
        index = VectorStoreIndex([each.node for each in nodes()], embed_model=WordEmbedding())
        tool = QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), name="berths", description="berths")

        class Asking(LLMQuestionGenerator):
            def generate(self, *_: Any, **__: Any) -> list[SubQuestion]:
                return [SubQuestion(sub_question="How many?", tool_name="berths")]

        engine = SubQuestionQueryEngine.from_defaults(
            [tool], llm=llm, question_gen=Asking.from_defaults(llm=llm), use_async=False, verbose=False
        )
        for error in FEW:
            fake_of(llm.engine).error = error
            caplog.clear()
            engine.query("How many?")
            found = [each for each in caplog.records if str(error) in each.getMessage()]
            assert any(each.levelno >= logging.WARNING and not _is_mute(each.name) for each in found), error


def _is_mute(name: str) -> bool:
    """Whether a logger has a handler of its own or its parents', so that Python does not print its warnings."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.name != "root":
        if logger.handlers:
            return True
        logger = logger.parent
    return False


def test_no_logger_of_ours_is_mute() -> None:
    """LlamaIndex gives its loggers a handler that prints nothing."""
    import llama_index.llms.cacheclip.base as model
    import llama_index.response_synthesizers.cacheclip.packing as packing

    assert _is_mute("llama_index.core")
    assert not [module for module in (model, packing) if _is_mute(module.logger.name)]


TEXTS = {
    "german": "Die Donaudampfschifffahrtsgesellschaft prüft jährlich die Brandschutzverordnungen ihrer Hafengebäude. ",
    "chinese": "港务局长每天早晨检查灯塔，然后记录水位和风速。",
    "code": "def berth(ship):\n    return {'id': ship['id'], 'dock': [x ** 2 for x in range(ship['n'])]}\n\n",
}


class TestPacking:
    @pytest.mark.long
    @pytest.mark.parametrize(
        ("mode", "text"), [("compact", "german"), ("refine", "chinese"), ("simple_summarize", "code")]
    )
    def test_prompts_of_stock_components_fit(self, tiny_models: dict[str, str], mode: str, text: str) -> None:
        """Counted by the model's own tokenizer. By LlamaIndex's default one, they would not."""
        SentenceSplitter()  # makes LlamaIndex choose its default
        models: Any = {"primary": tiny_models["llama"], "auxiliary": None}
        llm = CacheClipLLM(**models, method="full", context_window=1000, max_tokens=8)
        parts = [f"{n}: {TEXTS[text] * 6}" for n in range(6)]
        # of LlamaIndex's simple_summarize, texts come as a Python list, with more characters than it has counted
        make = CacheClipSynthesizer if mode == "simple_summarize" else get_response_synthesizer
        synthesizer = make(llm=llm, response_mode=mode)
        found = [NodeWithScore(node=TextNode(text=part), score=1.0) for part in parts]
        stats = synthesizer.synthesize("How many?", found).metadata["cacheclip"]
        assert all(each["prompt_tokens"] <= 1000 for each in stats)
        if mode != "simple_summarize":  # it leaves out what does not fit, and says so
            whole = sum(len(llm.tokenizer(part)) for part in parts)
            assert sum(each["prompt_tokens"] for each in stats) > whole, "nothing is left out"

    def test_the_users_tokenizer_stays(self, llm: CacheClipLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("llama_index.core.global_tokenizer", str.split)
        assert llm.metadata.context_window and Settings.tokenizer is str.split

    def test_each_models_prompts_are_counted_by_its_own(self, tiny_models: dict[str, str]) -> None:
        for name in ("llama", "auxiliary"):
            each = CacheClipLLM(primary=tiny_models[name])
            get_response_synthesizer(llm=each)
            assert Settings.tokenizer == each.tokenizer
            text = "Die Hafenmeisterin wohnt am Kai."
            assert Settings.tokenizer(text) == list(each.engine.primary.tokenize(text).ids)

    def test_nothing_is_fetched_to_count(self) -> None:
        assert CacheClipLLM(primary="some/model").metadata.context_window
        said = "The keeper lived there."
        assert SentenceSplitter(chunk_size=64, chunk_overlap=0).split_text(said) == [said]

    def test_it_keeps_no_weights(self, tiny_models: dict[str, str]) -> None:
        tokenizer = pickle.loads(pickle.dumps(CacheClipLLM(primary=tiny_models["llama"]).tokenizer))
        unload_models()
        assert tokenizer("It says.") and not _registry

    def test_a_servers_is_elsewhere(self) -> None:
        llm = CacheClipLLM(base_url="http://127.0.0.1:1/v1")
        with pytest.raises(ConfigurationError, match="AutoTokenizer"):
            _ = llm.tokenizer
