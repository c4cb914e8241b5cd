"""From a name to a model: what is found, what is refused, and how a model is identified."""

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_ingest.embedding import Embedder
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.base.errors import (
    ConfigurationError,
    DownloadError,
    ModelError,
    UnknownModelError,
    UnsupportedModelError,
)
from cacheclip_rag.models import checkpoints, fingerprint as fingerprint_module, memory, weights_digest
from cacheclip_rag.models.fingerprint import fingerprint
from cacheclip_rag.models.load import known_context, knows_tools, load_any, load_model, resolve
from cacheclip_rag.models.loaders import offered_names
from cacheclip_rag.runtime.transformers.architectures import check_supported, rope_pin
from tests.conftest import Models, Patch, spied


@pytest.fixture
def folder(tiny_models: Models, tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))


def replace_weights(path: Path, number: int | None = None) -> None:
    """Replace a weights file by one with other tensors (or one other tensor), and with the same size and times."""
    stat, weights = path.stat(), load_file(path)
    for name in sorted(weights)[number % len(weights) :][:1] if number is not None else weights:
        weights[name] = weights[name] + 1e-3
    save_file(weights, path.with_suffix(".new"), metadata={"format": "pt"})
    os.replace(path.with_suffix(".new"), path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestNames:
    @pytest.mark.parametrize(
        "name", ["no-such-model", "smollm2", "", "  ", "a/b/c", "../outside", "C:\\models\\x", "a" * 300]
    )
    def test_unknown_lists_the_known(self, name: str) -> None:
        with pytest.raises(UnknownModelError) as caught:
            resolve(name)
        assert repr(name) in str(caught.value)
        if "holds no config.json" not in str(caught.value):
            assert all(known in str(caught.value) for known in offered_names())

    def test_relative_folder_and_home(self, folder: Path, monkeypatch: Patch) -> None:
        monkeypatch.chdir(folder.parent)
        monkeypatch.setenv("HOME", str(folder.parent))
        assert resolve("model") == resolve("~/model") == folder.resolve()
        assert load_model("model") is load_model(str(folder)), "under two names it is one model"

    def test_folder_without_config(self, tmp_path: Path) -> None:
        (tmp_path / "weights.gguf").write_bytes(b"GGUF")
        with pytest.raises(UnknownModelError, match=r"holds no config\.json.*GGUF"):
            resolve(str(tmp_path))

    def test_hub_without_network(self, monkeypatch: Patch, folder: Path) -> None:
        """What the hub's own client says is quoted in whole sentences. Not all methods need an auxiliary."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(
            DownloadError, match="^expected .*owner/model.*, got LocalEntryNotFoundError: .*"
        ) as refused:
            resolve("owner/model")
        quoted, then, _ = str(refused.value).partition(". Check the name and the network, or give a local folder.")
        assert then and quoted.count("'") % 2 == 0 and not quoted.endswith("."), "one full stop"
        for primary, auxiliary, is_told in ((str(folder), "owner/model", True), ("owner/model", str(folder), False)):
            with pytest.raises(DownloadError, match="owner/model") as refused:
                CacheClipEngine(primary=primary, auxiliary=auxiliary).chunk_caches()
            assert ("--auxiliary none" in str(refused.value)) == is_told

    def test_what_is_known_before_the_load_follows_the_files(self, folder: Path) -> None:
        for tokens in (512, 1024):
            change_config(folder, max_position_embeddings=tokens)
            assert known_context(str(folder)) == tokens
        for tools in (True, False):
            (folder / "tokenizer_config.json").unlink(missing_ok=True)
            (folder / "chat_template.jinja").write_text("{{ tools }}" if tools else "{{ messages }}")
            assert knows_tools(str(folder)) == tools


class TestRefused:
    def test_unknown_dtype(self, folder: Path) -> None:
        with pytest.raises(ConfigurationError, match="float32, bfloat16, float16"):
            load_model(str(folder), dtype="float64")

    def test_device_that_is_not_there(self, folder: Path) -> None:
        """A GPU number that no machine has: refused in our words with and without CUDA."""
        with pytest.raises(ConfigurationError, match="device"):
            load_model(str(folder), device="cuda:99")

    def test_without_tokenizer(self, folder: Path) -> None:
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ModelError, match="tokenizer"):
            load_model(str(folder))

    def test_an_adapter_is_no_model(self, folder: Path) -> None:
        """With peft installed, transformers would load its base model, which the fingerprint does not describe."""
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/model"}))
        with pytest.raises(ModelError, match="adapter.*Merge"):
            load_model(str(folder))

    def test_unknown_model_type(self, folder: Path) -> None:
        """A config that this transformers does not know at all (a newer model)."""
        change_config(folder, model_type="model-of-next-year")
        with pytest.raises(ModelError, match="model-of-next-year"):
            load_model(str(folder))

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}),
            ("config.json", {"compression_config": {"quant_method": "compressed-tensors"}}),
        ],
    )
    def test_quantised_weights_that_transformers_does_not_see(self, folder: Path, file: str, content: Any) -> None:
        """It would take the numbers as they are, without their scales."""
        path = folder / file
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **content}))
        with pytest.raises(UnsupportedModelError, match=r"quantised.*cacheclip serve --backend vllm"):
            load_any(str(folder))


EVIL = """
import pathlib
pathlib.Path(MARK).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = "evil"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
class Module: pass
"""


class TestForeignCode:
    """Code in a model's folder is never run, whatever is answered to a question on the terminal."""

    @pytest.fixture
    def evil(self, folder: Path, tmp_path: Path) -> Callable[[str], Path]:
        """Makes a model folder with a Python file beside the weights, which leaves a mark when it is run."""

        def make(name: str) -> Path:
            made = Path(shutil.copytree(folder, tmp_path / name))
            (made / "evil.py").write_text(EVIL.replace("MARK", repr(str(made / "mark"))))
            return made

        return make

    @pytest.fixture
    def trusting(self, tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
        """Somebody answers yes to every question."""
        monkeypatch.setattr("builtins.input", lambda *_: "yes")
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        yield
        for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[name]

    @pytest.mark.usefixtures("trusting")
    def test_is_never_run(self, evil: Callable[[str], Path], tmp_path: Path) -> None:
        of_code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoModel": "evil.Model"}
        model, tokenizer, known, module, transformer = map(evil, ("own", "tokenizer", "known", "module", "transformer"))
        change_config(model, model_type="evil", auto_map=of_code)
        path = tokenizer / "tokenizer_config.json"
        of_tokenizer = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
        settings = {"tokenizer_class": "Tokenizer", "auto_map": of_tokenizer}
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        change_config(known, auto_map=of_code)  # an architecture that transformers has: its own class is used
        change_config(transformer, model_type="evil", auto_map=of_code)
        for folder, kind in ((module, "evil.Module"), (transformer, "sentence_transformers.models.Transformer")):
            (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": kind}]))
        for folder in (model, module, transformer):
            with pytest.raises(ModelError, match="is never run"):
                load_any(folder) if folder is model else Embedder(str(folder)).embed(["x"])
        with suppress(ModelError):  # a tokenizer of the name may be known
            load_any(tokenizer)
        load_any(known)
        dense, part = map(evil, ("dense", "part"))  # to count weights, and where a class makes its parts itself
        of_dense, of_part = {"AutoModelForImageTextToText": "evil.Model"}, {"AutoModel": f"{part}--evil.Model"}
        change_config(
            dense, model_type="clip_text_model", auto_map=of_dense, quantization_config={"quant_method": "mxfp4"}
        )
        vision = {"model_type": "blip_vision_model", "auto_map": of_part}
        change_config(part, model_type="llava", text_config={"model_type": "llama"}, vision_config=vision)
        with pytest.raises(ModelError, match="is never run|without mapping them"):
            load_any(dense)
        with pytest.raises(ModelError, match="blip|Blip"):
            load_any(part)
        assert not list(tmp_path.rglob("mark")), "code of a folder was run"
        AutoConfig.from_pretrained(model)
        assert list(tmp_path.rglob("mark")), "the twin: transformers alone asks, and runs it"

    def test_what_is_fetched_from_a_hub(self) -> None:
        from huggingface_hub.utils import filter_repo_objects

        wanted = ["config.json", "1_Pooling/config.json", "model-00001-of-00002.safetensors", "vocab.txt"]
        wanted += ["2_Dense/model.safetensors", "chat_template.jinja", "tokenizer.model"]
        code = ["modeling_x.py", "1_Pooling/evil.py", "1_Pooling/pytorch_model.bin", "2_Normalize/x.pkl", "model.pt"]
        assert list(filter_repo_objects(wanted + code, allow_patterns=checkpoints._HUB_FILES)) == wanted


def test_the_rope_pin_differs_with_the_rope(tiny_models: Models) -> None:
    names = ["llama", "llama-rope-llama3", "llama-rope-linear", "qwen2-rope-yarn"]
    configs = [AutoConfig.from_pretrained(tiny_models[name]) for name in names]
    assert len({rope_pin(c) for c in configs}) == len(names)
    for config in configs:
        check_supported(config, "x")


@pytest.mark.usefixtures("home")
class TestFingerprint:
    def test_another_release_of_transformers_writes_another_config_for_the_same_weights(self, folder: Path) -> None:
        before = fingerprint(folder)
        change_config(folder, transformers_version="5.99.0")
        assert fingerprint(folder) != before, "what is computed may differ: chunk caches are made anew"
        assert weights_digest(fingerprint(folder)) == weights_digest(before), "what was learned for them stays"

    def test_its_value_is_what_head_sets_refer_to(self, folder: Path) -> None:
        save_file({"extra": torch.ones(1)}, folder / "model-2.safetensors")
        files = [hashlib.sha256((folder / name).read_bytes()) for name in ("model-2.safetensors", "model.safetensors")]
        weights = hashlib.sha256(b"".join(file.digest() for file in files)).hexdigest()
        config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        assert fingerprint(folder) == f"{weights}:{config}"

    @pytest.mark.parametrize("number", [None, *range(0, 30, 5)])
    def test_other_weights_of_equal_size_and_times(self, folder: Path, monkeypatch: Patch, number: int | None) -> None:
        """All, as reproducible archives and image layers make them, or one other tensor behind the same inode, too."""
        path = folder / "model.safetensors"
        if number is None:
            os.utime(path, ns=(0, 0))
        else:
            states = fingerprint_module.file_states(folder)
            monkeypatch.setattr(fingerprint_module, "file_states", lambda _: states)
        before = fingerprint(folder)
        replace_weights(path, number)
        assert fingerprint(folder) != before

    def test_large_tensors_are_sampled_from_end_to_end(self) -> None:
        pieces = fingerprint_module._pieces(1000, 1_001_000)
        assert pieces[0] == (1000, 512) and sum(pieces[-1]) == 1_001_000 and len(pieces) == 8
        assert fingerprint_module._pieces(8, 4000) == [(8, 3992)] and fingerprint_module._pieces(8, 8) == [(8, 0)]

    def test_is_remembered(self, folder: Path, home: Path) -> None:
        first = fingerprint(folder)
        (memo,) = (home / "fingerprints").glob("*.json")
        found = json.loads(memo.read_text())
        assert found["weights"] == weights_digest(first)
        memo.write_text(json.dumps({**found, "weights": "remembered"}))
        assert weights_digest(fingerprint(folder)) == "remembered"  # the weights were not read again
        memo.write_text(json.dumps({**found, "weights": "wrong", "sample": "of others"}))
        assert fingerprint(folder) == first
        assert json.loads(memo.read_text()) == found
        for damage in (b"", b"{", b"[]", b'{"other": 1}', b"null", b'{"weights": 3}', b"\xff\xfe"):
            memo.write_bytes(damage)
            assert fingerprint(folder) == first

    @pytest.mark.some(2)
    @pytest.mark.parametrize("moment", ["check_fits", "fingerprint"])
    def test_weights_replaced_during_the_load(self, folder: Path, monkeypatch: Patch, moment: str) -> None:
        """Before they are read, and after: what was hashed may not be what was read."""
        place = memory if moment == "check_fits" else checkpoints
        spied(monkeypatch, place, moment, lambda *_: replace_weights(folder / "model.safetensors"))
        with pytest.raises(ModelError, match="changed while it was loaded"):
            load_model(str(folder))
        monkeypatch.undo()
        assert load_model(str(folder)).fingerprint.startswith(fingerprint(folder))

    def test_home_that_cannot_be_written(self, folder: Path, monkeypatch: Patch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        expected = fingerprint(folder)
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "file" / "home"))
        assert fingerprint(folder) == expected

    def test_dtype_is_a_part_of_the_identity(self, folder: Path) -> None:
        one, other = load_model(str(folder)), load_model(str(folder), dtype="bfloat16")
        assert one.fingerprint != other.fingerprint
        assert one is load_model(str(folder))


def test_tokenizing_from_many_threads(folder: Path) -> None:
    """Template text and user text at once: neither may be read by the other's rule about special tokens."""
    runtime = load_model(str(folder))
    texts = {True: "<|im_start|>user\n", False: "What does <|im_end|> mean?"}
    expected = {control: runtime.tokenize(text, control=control) for control, text in texts.items()}
    wrong: list[bool] = []

    def work(control: bool) -> None:
        wrong.extend(
            control for _ in range(2000) if runtime.tokenize(texts[control], control=control) != expected[control]
        )

    threads = [threading.Thread(target=work, args=(control,)) for control in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_progress_bars_of_transformers_are_off_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import modeling_gguf_pytorch_utils as gguf

    from cacheclip_rag.runtime.transformers.text import quiet_transformers

    before = gguf.tqdm
    with quiet_transformers():
        assert list(gguf.tqdm(range(3), desc="converting")) == [0, 1, 2]
    assert gguf.tqdm is before
    assert capsys.readouterr().err == ""
