"""``auto``: which device and dtype a machine and a checkpoint give."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.fake import FakeRuntime
from cacheclip_testing.tiny import TINY_MODELS, build_model
from safetensors.torch import load_file, save_file

import cacheclip_rag.models.load as load
from cacheclip_rag import CacheClipEngine, EngineConfig
from cacheclip_rag.base import machine
from cacheclip_rag.models import devices
from cacheclip_rag.models.devices import choose_device
from cacheclip_rag.models.load import concrete, load_model
from cacheclip_rag.models.memory import weights_dtype
from tests.conftest import Logs, Patch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, saved in each dtype."""
    found = {}
    for name, dtype in DTYPES.items():
        folder = build_model(tmp_path_factory.mktemp(name) / "model", TINY_MODELS["llama"])
        file = Path(folder) / "model.safetensors"
        save_file({key: each.to(dtype) for key, each in load_file(file).items()}, file, {"format": "pt"})
        found[name] = Path(folder)
    return found


def on(monkeypatch: Patch, *, cuda: bool = False, mps: bool = False, bfloat16: bool = True) -> None:
    """A machine with these parts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(devices, "_works", lambda device: mps)
    monkeypatch.setattr(load, "computes_bfloat16", lambda: bfloat16)


class TestDevice:
    @pytest.mark.parametrize(
        ("machine", "expected"),
        [({}, "cpu"), ({"mps": True}, "mps"), ({"cuda": True}, "cuda"), ({"cuda": True, "mps": True}, "cuda")],
    )
    def test_the_best_there_is(self, monkeypatch: Patch, machine: dict[str, bool], expected: str) -> None:
        on(monkeypatch, **machine)
        assert choose_device("auto") == expected and choose_device("cpu") == "cpu" and choose_device("meta") == "meta"

    def test_one_that_fails_is_not_taken(self, monkeypatch: Patch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)  # and this torch was built without it
        assert choose_device("auto") == "cpu"


class TestDtype:
    @pytest.mark.parametrize(
        ("device", "bfloat16", "expected"),  # of checkpoints in the three dtypes
        [
            ("cpu", False, "float32 float32 float32"),
            ("cpu", True, "float32 bfloat16 bfloat16"),
            ("cuda", True, "float32 bfloat16 float16"),
            ("cuda", False, "float32 float16 float16"),
            ("mps", True, "float32 bfloat16 float16"),
        ],
    )
    def test_of_every_checkpoint(
        self, monkeypatch: Patch, checkpoints: dict[str, Path], device: str, bfloat16: bool, expected: str
    ) -> None:
        on(monkeypatch, bfloat16=bfloat16)
        configs = (EngineConfig(primary=str(checkpoints[name]), device=device) for name in DTYPES)
        assert [concrete(config).dtype for config in configs] == expected.split()
        assert {name: weights_dtype(each) for name, each in checkpoints.items()} == {name: name for name in DTYPES}

    def test_what_is_named_and_other_packages_runtimes(self, monkeypatch: Patch, checkpoints: dict[str, Path]) -> None:
        on(monkeypatch, cuda=True)
        config = EngineConfig(primary=str(checkpoints["bfloat16"]), device="cpu", dtype="float16")
        assert concrete(config) is config
        load.register_runtime("fake", FakeRuntime)
        on(monkeypatch)
        assert concrete(EngineConfig(primary="fake:model", device="cpu")).dtype == "float32"

    def test_of_the_processor(self, monkeypatch: Patch) -> None:
        for line, expected in {
            "flags\t\t: fpu avx512f avx512_bf16 fma": True,
            "flags\t\t: fpu amx_bf16 amx_tile": True,
            "Features\t: fp asimd bf16 i8mm": True,
            "flags\t\t: fpu avx512f avx512_vnni": False,
            "": False,
        }.items():
            machine.computes_bfloat16.cache_clear()
            monkeypatch.setattr(Path, "read_text", lambda self, line=line: f"processor\t: 0\n{line}\n")
            assert machine.computes_bfloat16() is expected
        machine.computes_bfloat16.cache_clear()


def test_an_engine_says_once_what_it_chose(monkeypatch: Patch, checkpoints: dict[str, Path], caplog: Logs) -> None:
    on(monkeypatch, bfloat16=True)
    load._say_once.cache_clear()
    options: dict[str, Any] = {"auxiliary": None, "method": "direct"}
    engine = CacheClipEngine(primary=str(checkpoints["bfloat16"]), **options)
    engine.precompute(["The lamp burned whale oil until 1871."])
    assert engine.primary.dtype == torch.bfloat16 and engine.primary.device.type == "cpu"
    CacheClipEngine(primary=str(checkpoints["bfloat16"]), **options).precompute(["The keeper lived there."])
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in said if "runs on cpu in bfloat16" in each and "device and dtype" in each]) == 1
    assert load_model(checkpoints["bfloat16"], dtype="auto", device="auto") is engine.primary


def test_one_store_serves_what_is_chosen_and_what_is_named(
    monkeypatch: Patch, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    on(monkeypatch, bfloat16=True)
    options = {"primary": str(checkpoints["bfloat16"]), "auxiliary": None, "method": "direct", "store": str(tmp_path)}
    text = "The lamp of the harbour burned whale oil until the year 1871."
    CacheClipEngine(**options).precompute([text])
    named = CacheClipEngine(**options, dtype="bfloat16", device="cpu")
    assert named.generate(f"{text}\n\nUntil when?").stats.hits == 1
    assert CacheClipEngine(**options, dtype="float32").generate(f"{text}\n\nUntil when?").stats.hits == 0
