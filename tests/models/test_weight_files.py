"""Weights are those of the checkpoint's files, all of them, and stay what they were whatever becomes of the files."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from cacheclip_ingest.embedding import Embedder
from cacheclip_testing.tiny import TINY_MODELS, make_tokenizer
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

from cacheclip_rag import CacheClipEngine, ModelError, SamplingParams
from cacheclip_rag.models.load import load_model, load_planning, load_tokenizer
from cacheclip_rag.runtime.transformers.weight_files import copy_mapped
from cacheclip_rag.store import read_tensors
from tests.conftest import CHUNKS, Models, rag_prompt

Tensors = dict[str, torch.Tensor]
FEW = SamplingParams(max_tokens=4)


def change_weights(folder: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    """Write other weights under the same name, as a new version of a model is written."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, folder / "new", metadata={"format": "pt"})
    (folder / "new").rename(file)


def copied(source: str, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    """Without the tensors that have one of these parts in their names."""
    return lambda tensors: {n: each for n, each in tensors.items() if not any(part in n for part in parts)}


def random_weights(tensors: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(each.shape, generator=generator) * 0.2 for name, each in tensors.items()}


@pytest.fixture
def folder(tiny_models: dict[str, str], tmp_path: Path) -> Path:
    return copied(tiny_models["llama"], tmp_path / "model")


class TestAllTensorsAreThere:
    @pytest.mark.parametrize("architecture", TINY_MODELS)
    def test_none_may_be_missing(self, tiny_models: dict[str, str], tmp_path: Path, architecture: str) -> None:
        folder = copied(tiny_models[architecture], tmp_path / "model")
        names = [*load_file(folder / "model.safetensors")]
        kinds = {name.partition(".layers.")[2].partition(".")[2] or name: name for name in names}
        missing = [name for name in kinds.values() if "experts" not in name]  # some versions merge those as they load
        for name in {*missing[:: max(1, len(missing) // 4)], missing[-1]}:
            broken = copied(str(folder), tmp_path / name)
            change_weights(broken, without(name))
            with pytest.raises(ModelError, match=r"weights of model .* lacks .*Fetch the model again") as caught:
                load_model(broken)
            assert name.rpartition(".")[0].rpartition(".")[2] in str(caught.value)

    @pytest.mark.parametrize("lost", ["layers.1.block_sparse_moe.experts.0.w1", ".experts.1.w1", ".experts.3."])
    def test_no_expert_may_be_missing(self, tiny_models: Models, tmp_path: Path, lost: str) -> None:
        folder = copied(tiny_models["mixtral"], tmp_path / "model")
        assert load_planning(folder).num_layers
        change_weights(folder, without(lost))
        for load, message in ((load_model, "Fetch the model again"), (load_planning, r"which lack .*experts\.[013]")):
            with pytest.raises(ModelError, match=message):
                load(folder)

    def test_names_of_another_version_and_another_shape(self, folder: Path) -> None:
        """As a checkpoint, or a new transformers, may call them."""
        name, tensors = "model.layers.0.self_attn.k_proj.weight", load_file(folder / "model.safetensors")
        change_weights(folder, lambda _: {n.replace("self_attn", "attention"): t for n, t in tensors.items()})
        with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.self_attn.* and \d+ more"):
            load_model(folder)
        change_weights(folder, lambda _: {**tensors, name: torch.ones(3, 5)})
        with pytest.raises(ModelError, match="k_proj|mismatched_sizes"):
            load_model(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.1.self_attn.q_norm.weight",
            "model.layers.0.self_attn.k_proj.lora_A.weight",
            "model.norm.bias",
            "lm_head.bias",
        ],
    )
    def test_a_tensor_that_would_be_left_out(self, folder: Path, name: str) -> None:
        change_weights(folder, lambda tensors: {**tensors, name: torch.ones(4)})
        with pytest.raises(ModelError, match=f"also has {name}"):
            load_model(folder)

    @pytest.mark.parametrize(
        "name",
        [
            "v_head.summary.weight",
            "model.layers.9.self_attn.q_proj.weight",
            "visual.patch.weight",
            "model.layers.0.self_attn.rotary_emb.inv_freq",
        ],
    )
    def test_other_heads_towers_and_layers_are_no_part_of_it(self, folder: Path, name: str) -> None:
        change_weights(folder, lambda tensors: {**tensors, name: torch.ones(4)})
        assert load_model(folder).num_layers

    @pytest.mark.parametrize("suffix", ["weight", "qweight"])
    def test_where_another_process_loads_them(self, folder: Path, suffix: str) -> None:
        """vLLM looks for all tensors in dense checkpoints only."""
        change_weights(folder, lambda each: {n.replace("proj.weight", f"proj.{suffix}"): t for n, t in each.items()})
        assert load_planning(folder).num_layers
        change_weights(folder, without(f"model.layers.1.mlp.up_proj.{suffix}"))
        with pytest.raises(ModelError, match=r"which lack model\.layers\.1\.mlp\.up_proj"):
            load_planning(folder)

    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("lost", "named"),
        [
            ("model.embed_tokens.weight", "model.embed_tokens"),
            ("model.norm.weight", "model.norm"),
            (".self_attn.k_proj.weight", "layers.0.self_attn.k_proj"),
            ("layers.1.self_attn.q_proj.bias", "layers.1.self_attn.q_proj.bias"),
            ("layers.1.mlp.down_proj.scales", "layers.1.mlp.down_proj.scales"),
            ("layers.0.mlp.down_proj.qweight", "layers.0.mlp.down_proj.qweight"),
        ],
    )
    def test_whatever_its_tensors_are_called(self, folder: Path, lost: str, named: str) -> None:
        """Quantised in all layers but the last one, as some are."""

        def quantise(tensors: Tensors) -> Tensors:
            found = dict(tensors)
            for name in tensors:
                if name.endswith("q_proj.weight"):
                    found[name.replace("weight", "bias")] = torch.ones(2)
                if "mlp" in name and "layers.2" not in name:
                    found[name.replace("weight", "qweight")] = torch.ones(2, dtype=torch.int32)
                    found[name.replace("weight", "scales")] = found.pop(name)
            return found

        change_weights(folder, quantise)
        assert load_planning(folder).num_layers == 3
        change_weights(folder, without(lost))
        with pytest.raises(ModelError, match=f"which lack .*{re.escape(named)}"):
            load_planning(folder)

    def test_pickles_and_lost_files_are_no_weights(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        index = {"weight_map": dict.fromkeys(load_file(file), file.name) | {"more": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"expected the weights .* as \*\.safetensors"):
            load_planning(folder)
        (folder / "model.safetensors.index.json").unlink()
        torch.save(load_file(file), folder / "pytorch_model.bin")
        assert load_planning(folder).num_layers
        file.unlink()
        for load in (load_planning, load_model):
            with pytest.raises(ModelError, match="safetensors"):
                load(folder)


class TestEmbeddingModel:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=300
        )
        (tmp_path / "bert").mkdir()
        BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "bert")
        make_tokenizer(300).save_pretrained(tmp_path / "bert")
        model = SentenceTransformer(modules=[Transformer(str(tmp_path / "bert")), Pooling(8)])
        model.save(str(tmp_path / "embedder"))
        return tmp_path / "embedder"

    def test_it_is_whole(self, folder: Path) -> None:
        """Also with the pooling layer of BERT, which the checkpoint lacks and embeddings do not use."""
        embedder = Embedder(str(folder), "cpu")
        assert embedder.embed(["lighthouse"]).shape == (1, 8)
        assert str(folder) not in Path("/proc/self/maps").read_text()

    def test_a_tensor_is_missing(self, folder: Path) -> None:
        change_weights(folder, without("encoder.layer.1.attention.self.key.weight"))
        with pytest.raises(ModelError, match=r"lacks encoder\.layer\.1\.attention\.self\.key\.weight"):
            Embedder(str(folder), "cpu").embed(["lighthouse"])


class TestFilesMayChange:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_running_engine_keeps_its_weights(
        self, tiny_models: dict[str, str], folder: Path, tmp_path: Path, dtype: str
    ) -> None:
        """The new version is copied over the old one, byte by byte, while both models are in use."""
        auxiliary = copied(tiny_models["auxiliary"], tmp_path / "auxiliary")
        engine = CacheClipEngine(
            primary=folder, auxiliary=auxiliary, store=tmp_path / "s", method="cacheclip", dtype=dtype
        )
        engine.precompute(list(CHUNKS))
        before = engine.generate(rag_prompt(CHUNKS), FEW)
        for each in (folder, auxiliary):
            file = each / "model.safetensors"
            with file.open("r+b") as opened:
                opened.seek(file.stat().st_size // 2)
                opened.write(bytes(file.stat().st_size // 2))
        engine.prefixes.clear()
        after = engine.generate(rag_prompt(CHUNKS), FEW)
        assert before.stats.hits == after.stats.hits > 0 and after.token_ids == before.token_ids

    @pytest.mark.long
    def test_a_file_that_gets_shorter_does_not_end_the_process(self, folder: Path) -> None:
        program = """
import sys
from pathlib import Path
from cacheclip_rag import CacheClipEngine, SamplingParams
engine = CacheClipEngine(primary=sys.argv[1], auxiliary=None)
first = engine.generate("Hello", SamplingParams(max_tokens=2), method="full")
(Path(sys.argv[1]) / "model.safetensors").write_bytes(b"")
engine.prefixes.clear()
assert engine.generate("Hello", SamplingParams(max_tokens=2), method="full").token_ids == first.token_ids
"""
        subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True)

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists the files that are mapped")
    def test_nothing_is_left_in_a_mapped_file(self, folder: Path, tmp_path: Path) -> None:
        runtimes = [load_model(folder, dtype=dtype) for dtype in ("float32", "bfloat16")]
        save_file({"weights": torch.ones(9)}, tmp_path / "heads.st")
        tensors, _ = read_tensors(tmp_path / "heads.st")
        assert runtimes and tensors and str(tmp_path) not in Path("/proc/self/maps").read_text()

    def test_weights_that_accelerate_moves_and_tied_ones(self, tiny_models: Models) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        before = [each.detach() for each in model.parameters()]
        cpu_offload(model, execution_device=torch.device("cpu"))
        copy_mapped(model)
        expected = model(rows := torch.randn(4, 2))
        for each in before:
            each.zero_()
        assert torch.equal(model(rows), expected) and expected.any()
        shared = torch.nn.Linear(2, 2)
        shared.bias = shared.weight  # type: ignore[assignment]
        copy_mapped(shared)
        assert shared.bias is shared.weight
        tied: Any = load_model(tiny_models["qwen2"]).model
        if tied.config.tie_word_embeddings:
            assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


class TestTrainedAgain:
    """Another version in the same folder, for a process that has the first one."""

    def test_a_new_engine_has_the_new_weights(self, folder: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {"auxiliary": None, "store": tmp_path / "s", "method": "direct"}
        old = CacheClipEngine(primary=folder, **options)
        old.precompute(list(CHUNKS))
        before = old.generate(rag_prompt(CHUNKS), FEW)
        change_weights(folder, random_weights)
        new = CacheClipEngine(primary=folder, **options)
        assert new.primary is not old.primary and new.primary.fingerprint != old.primary.fingerprint
        answer = new.generate(rag_prompt(CHUNKS), FEW)
        assert (before.stats.hits, answer.stats.hits) == (len(CHUNKS), 0)
        assert old.generate(rag_prompt(CHUNKS), FEW).token_ids == before.token_ids
        assert load_model(folder) is new.primary, "the earlier weights are freed with the engines that have them"

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
    def test_every_file_counts(self, folder: Path, file: str) -> None:
        before, path = load_model(folder), folder / file
        content = path.read_text() if path.exists() else "{}"
        path.write_text(json.dumps({**json.loads(content), "more": 1}) if file.endswith("json") else content + " ")
        assert load_model(folder) is not before

    def test_so_has_a_planner(self, folder: Path) -> None:
        planned = load_planning(folder)
        assert load_planning(folder) is planned
        change_weights(folder, random_weights)
        assert load_planning(folder).fingerprint != planned.fingerprint

    def test_a_tokenizer_without_weights(self, folder: Path) -> None:
        def count() -> int:
            return len(load_tokenizer(str(folder), dtype="float32", device="cpu")("lighthouse keeper"))

        before, tokenizer = count(), json.loads((folder / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "lighthouse"}, "content": ""}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert count() < before
