"""GGUF files that are not what they seem: each is refused with what llama.cpp found, or is read whole."""

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheclip_llamacpp import loader, weights
from cacheclip_testing.plugin import CHUNKS, QUESTION
from tiny_gguf import write_gguf

from cacheclip_rag import CacheClipEngine, ModelError, UnknownModelError, UnsupportedModelError
from cacheclip_rag.models import unload_models
from cacheclip_rag.plugins import python_command

PROMPT = "\n\n".join([*CHUNKS[:2], QUESTION])

DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "failed to read magic"),
    "a web page": (lambda data: b"<!DOCTYPE html>", "expected 'GGUF'"),
    "half": (lambda data: data[: len(data) // 2], "not within the file bounds"),
    "header": (lambda data: data[:300], r"\(\w"),
    "version": (lambda data: data[:4] + struct.pack("<I", 99) + data[8:], "version 99"),
    "huge count of fields": (lambda data: data[:16] + struct.pack("<Q", 1 << 60) + data[24:], "1152921504606846976"),
    "huge key": (lambda data: data[:24] + struct.pack("<Q", 1 << 62) + data[32:], r"\(\w"),
    "architecture": (lambda data: data.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0qwenX", 1), "'qwenX'"),
    "tokenizer": (lambda data: data.replace(b"gpt-2", b"gpt-X", 1), "gpt-X"),
}


def with_number(key: str, number: float) -> Callable[[bytes], bytes]:
    """What changes one number of a header."""

    def changed(data: bytes) -> bytes:
        at = data.index(key.encode()) + len(key) + 4  # behind the number's type
        return data[:at] + struct.pack("<f" if isinstance(number, float) else "<I", number) + data[at + 4 :]

    return changed


ENDS_LLAMA_CPP = {
    "more layers than it takes": ("qwen2", with_number("qwen2.block_count", 513), "n_layer_all"),
    "no layers": ("llama", with_number("llama.block_count", 0), "n_layer_all"),
    "heads": ("qwen2", with_number("qwen2.attention.head_count", 3), "ggml_nelements"),
    "key length": ("qwen2", with_number("qwen2.attention.key_length", 9), "n_embd_head"),
    "longer rotation than keys": ("gemma3", with_number("gemma3.rope.dimension_count", 64), "n_dims"),
    "longer than any": ("gemma3", with_number("gemma3.rope.dimension_count", 1 << 31), "view_src"),
    "epsilon": ("llama", with_number("llama.attention.layer_norm_rms_epsilon", -1.0), "eps >= 0"),
    "no rotation": ("gemma3", with_number("gemma3.rope.dimension_count", 0), "it computes without end"),
}
"""llama.cpp reports none of these: it ends its process, or (the last) computes without end."""


def engine_of(file: Path, store: Path | None = None) -> CacheClipEngine:
    return CacheClipEngine(primary=file, auxiliary=None, method="epic", store=store)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_says_what_llama_cpp_found(files: Any, tmp_path: Path, name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
    change, reason = DAMAGED[name]
    file = tmp_path / "model.gguf"
    content = change(files["qwen2"].read_bytes())
    assert content != files["qwen2"].read_bytes()
    file.write_bytes(content)
    with pytest.raises(ModelError, match=reason) as found:
        engine_of(file).generate(PROMPT)
    assert "Fetch it again" in str(found.value) and str(file) in str(found.value)
    assert not [*tmp_path.glob("fingerprints/*.loads")], "a trial that failed is not remembered"


@pytest.mark.parametrize("name", ENDS_LLAMA_CPP)
def test_wrong_numbers_do_not_end_the_process(files: Any, tmp_path: Path, name: str, monkeypatch: Any) -> None:
    architecture, change, reason = ENDS_LLAMA_CPP[name]
    monkeypatch.setattr(weights, "_TRIAL_CPU_S", 3)
    file = tmp_path / "model.gguf"
    file.write_bytes(change(files[architecture].read_bytes()))
    for _ in range(2):  # what has failed is not remembered as good
        with pytest.raises(ModelError, match=rf"would end this process over .*\({reason}|\(GGML_ASSERT\(.*{reason}"):
            engine_of(file).generate(PROMPT)


def test_a_trial_that_the_system_ends_says_nothing_of_the_file(files: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))  # where no file was tried
    monkeypatch.setattr(weights, "python_command", lambda *_: ["sh", "-c", "kill -9 $$"])
    with pytest.raises(ModelError, match="Is there memory for it") as found:
        engine_of(files["qwen2"]).generate(PROMPT)
    assert "header" not in str(found.value)


def test_a_trial_within_the_users_limit(files: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Whoever may use less of a processor than a trial takes at most has files tried, too."""
    limited = ("sh", "-c", 'ulimit -t 3; exec "$@"', "sh")
    monkeypatch.setattr(weights, "python_command", lambda *given: [*limited, *python_command(*given)])
    architecture, change, _ = ENDS_LLAMA_CPP["no rotation"]
    file = tmp_path / "model.gguf"
    file.write_bytes(change(files[architecture].read_bytes()))
    with pytest.raises(ModelError, match="would end this process over .*computes without end"):
        weights.check_header(file, "model.gguf", "digest")


def test_a_cache_in_which_nobody_may_look(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHECLIP_HOME", "/" + "x" * 300)  # no system has such names
    engine_of(files["qwen2"]).generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize("relative", ["", "."])
def test_a_trial_runs_no_code_of_the_current_folder(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str
) -> None:
    for name in ("llama_cpp", "ctypes", "resource"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{relative}:{os.environ.get('PYTHONPATH', '')}")  # the current folder
    monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))  # where no file was tried
    unload_models()
    engine_of(files["qwen2"]).generate(PROMPT, max_tokens=1)
    assert [*tmp_path.glob("home/fingerprints/*.loads")] and not [*tmp_path.glob("*.ran")]


def test_a_file_is_tried_once(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    unload_models()
    engine_of(files["qwen2"]).generate(PROMPT, max_tokens=1)
    unload_models()
    monkeypatch.setattr(weights, "python_command", None)
    engine_of(files["qwen2"]).generate(PROMPT, max_tokens=1)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling", "loop", "nothing", "long name"])
def test_what_is_no_file(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"{'model' * (100 if kind == 'long name' else 1)}.gguf"
    links = {"dangling": lambda: file.symlink_to("nowhere"), "loop": lambda: file.symlink_to(file)}
    {"folder": file.mkdir, "pipe": lambda: os.mkfifo(file), **links}.get(kind, lambda: None)()
    with pytest.raises(UnknownModelError, match="no GGUF file"):
        engine_of(file).generate(PROMPT)


@pytest.mark.parametrize("context", [0, 1 << 31])
def test_a_context_of_no_positions_is_refused(files: dict[str, Path], tmp_path: Path, context: int) -> None:
    file = write_gguf(tmp_path, "qwen2", files["qwen2"].parent / "model", context=context)
    with pytest.raises(UnsupportedModelError, match=r"trained for -?\d+ positions"):
        engine_of(file).generate(PROMPT)


def test_a_file_that_changes_while_it_is_loaded(files: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    file, digest = tmp_path / "model.gguf", loader.digest_of
    file.write_bytes(files["qwen2"].read_bytes())

    def exchanged(parts: list[Path]) -> str:
        found = digest(parts)
        (tmp_path / "other").write_bytes(files["llama"].read_bytes())
        (tmp_path / "other").replace(file)
        return found

    monkeypatch.setattr(loader, "digest_of", exchanged)
    with pytest.raises(ModelError, match="changed while it was loaded"):
        engine_of(file).generate(PROMPT)


def test_a_link_is_the_model_it_leads_to(files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(files["qwen2"])
    assert engine_of(tmp_path / "link.gguf").primary is engine_of(files["qwen2"]).primary


class TestSplit:
    """A model in several files, as hubs have large ones, often as links to files with other names."""

    @pytest.fixture
    def first(self, files: dict[str, Path], tmp_path: Path) -> Path:
        unload_models()
        source = files["qwen2"].parent / "model"
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        write_gguf(tmp_path / "blobs", "qwen2", source, split_max_tensors=20)
        for number, part in enumerate(sorted((tmp_path / "blobs").glob("*.gguf"))):
            (tmp_path / "snapshot" / part.name).symlink_to(part.rename(part.with_name(f"blob{number}")))
        return min((tmp_path / "snapshot").iterdir())

    def test_it_is_the_whole_model(self, files: dict[str, Path], first: Path) -> None:
        assert len(list(first.parent.iterdir())) > 1
        found, whole = (engine_of(file).generate(PROMPT, max_tokens=8) for file in (first, files["qwen2"]))
        assert found.token_ids == whole.token_ids

    def test_kv_of_another_part_is_not_used(self, first: Path, tmp_path: Path) -> None:
        engine_of(first, tmp_path / "store").precompute(CHUNKS[:2])
        assert engine_of(first, tmp_path / "store").generate(PROMPT, max_tokens=1).stats.hits == 2
        unload_models()
        last = max(first.parent.iterdir()).resolve()
        content = bytearray(last.read_bytes())
        content[-1] ^= 1  # of a weight
        last.write_bytes(content)
        assert engine_of(first, tmp_path / "store").generate(PROMPT, max_tokens=1).stats.hits == 0

    def test_a_part_is_missing_or_another_than_the_first(self, first: Path) -> None:
        last = max(first.parent.iterdir())
        with pytest.raises(ModelError, match="first split"):
            engine_of(last).generate(PROMPT)
        last.unlink()
        with pytest.raises(ModelError, match=r"-of-\d{5}\.gguf"):
            engine_of(first).generate(PROMPT)


class TestWeightsAreThoseOfTheFile:
    @pytest.mark.parametrize("name", [b"blk.1.attn_k.weight", b"blk.0.ffn_down.weight", b"output_norm.weight"])
    def test_a_tensor_is_missing(self, files: dict[str, Path], tmp_path: Path, name: bytes) -> None:
        content = files["qwen2"].read_bytes()
        assert content.count(name) == 1
        file = tmp_path / "model.gguf"
        file.write_bytes(content.replace(name, b"no" + name[2:]))
        with pytest.raises(ModelError, match=name.decode()):
            engine_of(file).generate(PROMPT)

    def test_a_running_engine_keeps_its_weights(self, files: dict[str, Path], tmp_path: Path) -> None:
        file = Path(shutil.copy(files["qwen2"], tmp_path / "model.gguf"))
        engine = engine_of(file, tmp_path / "s")
        engine.precompute(list(CHUNKS))
        before = engine.generate(PROMPT, max_tokens=4)
        assert str(file) not in Path("/proc/self/maps").read_text()
        with file.open("r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            opened.write(bytes(file.stat().st_size // 2))
        after = engine.generate(PROMPT, max_tokens=4)
        assert before.stats.hits == after.stats.hits > 0 and after.token_ids == before.token_ids

    def test_a_new_engine_has_the_new_ones(self, files: dict[str, Path], tmp_path: Path) -> None:
        file = Path(shutil.copy(files["qwen2"], tmp_path / "model.gguf"))
        old = engine_of(file).primary
        shutil.copy(files["llama"], tmp_path / "new").rename(file)
        new = engine_of(file).primary
        assert new.fingerprint != old.fingerprint and engine_of(file).primary is new
