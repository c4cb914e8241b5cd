"""Whether a model fits: its size by the files, what is free, and the refusal."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cacheclip_rag.base.errors import ModelError
from cacheclip_rag.models import memory
from cacheclip_rag.models.load import load_model
from cacheclip_rag.models.memory import check_fits, free_bytes, weight_bytes


@pytest.fixture
def folder(tiny_models: dict[str, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))


class TestWeights:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_by_hand(self, folder: Path, dtype: torch.dtype) -> None:
        expected = sum(each.numel() for each in load_file(folder / "model.safetensors").values()) * dtype.itemsize
        assert weight_bytes(folder, dtype) == expected > 0

    def test_shards_as_the_index_names_them(self, folder: Path) -> None:
        """A second copy of the weights, in another layout, does not count."""
        whole = weight_bytes(folder, torch.float32)
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2])):
            save_file({name: tensors[name] for name in part}, folder / f"part-{number}.safetensors")
            weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert (folder / "model.safetensors").is_file()
        assert weight_bytes(folder, torch.float32) == whole

    def test_quantised_numbers_stay_what_they_are(self, tmp_path: Path) -> None:
        eight_bits = {"a": torch.zeros(10, dtype=torch.int8), "c": torch.zeros(30, dtype=torch.float8_e4m3fn)}
        save_file({**eight_bits, "b": torch.zeros(10)}, tmp_path / "model.safetensors")
        assert weight_bytes(tmp_path, torch.bfloat16) == 10 + 30 + 20

    @pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x02" + b"\0" * 7 + b"[]"])
    def test_damaged_files_are_for_the_loader_to_name(self, folder: Path, content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        assert weight_bytes(folder, torch.float32) == 0
        with pytest.raises(ModelError, match="missing, damaged"):
            load_model(str(folder))


class TestFree:
    def test_this_machine(self) -> None:
        free = free_bytes("cpu")
        assert free is None or 2**20 < free < 2**50
        assert free_bytes("auto") is None and free_bytes("meta") is None

    def test_a_container_may_have_less(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = [tmp_path / name for name in ("limit", "used", "stat")]
        for file, text in zip(files, ("1000\n", "700\n", "anon 300\ninactive_file 150\n"), strict=True):
            file.write_text(text)
        monkeypatch.setattr(memory, "_CGROUPS", [tuple(map(str, files))])
        assert free_bytes("cpu") == 450
        files[0].write_text("max\n")
        monkeypatch.setattr(memory, "_free_in_system", lambda: 7)
        assert free_bytes("cpu") == 7


class TestRefusal:
    def test_says_how_much_and_what_else(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        needed = weight_bytes(folder, torch.float32)
        monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
        with pytest.raises(ModelError, match="needs .* GiB on 'cpu' as float32.*are free.*bfloat16.*smaller model"):
            load_model(str(folder))
        check_fits(folder, "half", torch.bfloat16, "cpu")  # takes half of it
        monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
        load_model(str(folder))

    def test_unknown_is_no_reason(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "free_bytes", lambda device: None)
        check_fits(folder, "any", torch.float32, "cpu")
