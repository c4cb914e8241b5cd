"""vLLM engines on tiny models. ``make test-vllm`` runs these tests in an environment of its own.

Engines run in the process of the tests, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab.certificates import verdicts as certificates
from cacheclip_testing import build_auxiliary, build_model
from vllm_engines import CHUNKS, MODELS, TEMPLATES, Setting, clean_up

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_NO_USAGE_STATS"] = "1"


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the setting of a model, once."""
    folder, made = tmp_path_factory.mktemp("vllm"), dict[str, Setting]()

    def setting(name: str = "qwen3") -> Setting:
        if name not in made:
            own = folder / name
            options = {
                "primary": str(build_model(own / "model", MODELS[name])),
                "auxiliary": str(build_auxiliary(own / "auxiliary")),
                "store": str(own / "store"),
                "chunk_context": "passages",
                "method": "cacheclip",
                "prefix_cache_bytes": 0,
            }
            if name in TEMPLATES:
                (own / "model" / "chat_template.jinja").write_text(TEMPLATES[name])
            made[name] = Setting(options["primary"], options["store"], options)
            made[name].engine.precompute(CHUNKS)
            assert all(made[name].engine.is_stored(chunk) for chunk in CHUNKS)
        return made[name]

    return setting


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where certificates are."""
    monkeypatch.setattr(certificates, "_folder", lambda: tmp_path / "certificates")
    return tmp_path / "certificates"


@pytest.fixture
def alone() -> Iterator[None]:
    """Engines in this process leave vLLM's groups behind."""
    yield
    clean_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM's own, of which there are many
