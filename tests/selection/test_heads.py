"""Head sets: what they score, against transformers' eager attention, and their files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_lab.evaluation.bench import bench
from safetensors.torch import load_file, save_file

from cacheclip_rag import CacheClipEngine, ConfigurationError, EngineConfig, ModelError, SamplingParams
from cacheclip_rag.methods import Method, preset, vary
from cacheclip_rag.models import weights_digest
from cacheclip_rag.models.load import load_model
from cacheclip_rag.selection import heads as module
from cacheclip_rag.selection.auxiliary_pass import score_chunks
from cacheclip_rag.selection.heads import (
    HeadSet,
    check_head_set_name,
    find_head_set,
    head_set_path,
    load_named,
    model_digest,
)
from tests.conftest import CACHECLIP, CHUNKS, spied
from tests.fusion.cases import reference_model
from tests.selection.test_auxiliary_scores import Scored

SHA = "a" * 64
PROMPT = "\n\n".join([*CHUNKS, "What is the magic number?"])


def some_heads(runtime: Any, **changes: Any) -> HeadSet:
    last = runtime.num_layers - 1
    sha256 = weights_digest(runtime.fingerprint)
    return replace(HeadSet(sha256, ((0, 1), (last, 0), (last, 1)), torch.tensor([0.2, 0.5, 0.3])), **changes)


@pytest.fixture(params=["auxiliary", "qwen2", "llama-rope-linear"])
def folder(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    return tiny_models[request.param]


@pytest.fixture
def scored(folder: str, chunks: list[str], question: str) -> Scored:
    return Scored(load_model(folder), chunks, question)


def scores(scored: Scored, heads: Any, *numbers: int) -> list[torch.Tensor]:
    kv = [scored.kv[number] for number in numbers or range(len(scored.kv))]
    return score_chunks(scored.runtime, scored.prefix, kv, scored.question_ids, heads=heads)


class TestScores:
    def test_heads_are_those_of_plain_transformers(self, scored: Scored, folder: str) -> None:
        """Of one chunk, where a pooled softmax is eager attention over the chunk's columns alone."""
        model, heads = reference_model(folder), some_heads(scored.runtime)
        for number, ids in enumerate(scored.chunk_ids):
            sequence = torch.tensor([[*scored.prefix_ids, *ids, *scored.question_ids]])
            start = len(scored.prefix_ids)
            expected = torch.zeros(len(ids))
            with torch.inference_mode():
                attentions = model(input_ids=sequence, output_attentions=True).attentions
            for (of, head), weight in zip(heads.heads, heads.weights, strict=True):
                rows = attentions[of][0, head, -len(scored.question_ids) :, start : start + len(ids)]
                expected += weight * (rows / rows.sum(-1, keepdim=True)).mean(0)
            [found] = scores(scored, heads, number)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
            other = some_heads(scored.runtime, heads=((0, 0), *heads.heads[1:]))
            assert float((found - scores(scored, other, number)[0]).abs().max()) > 1e-4

    def test_one_softmax_over_all_chunks(self, scored: Scored) -> None:
        """Sinks score nothing and leave the rest to others."""
        for sinks in (0, 3):
            found = scores(scored, replace(some_heads(scored.runtime), sinks=sinks))
            assert all(not score[:sinks].any() and bool((score[sinks:] > 0).all()) for score in found)
            assert sum(float(score.sum()) for score in found) == pytest.approx(1.0, abs=1e-5)

    def test_a_chunk_of_nothing_but_sinks_does_not_upset_the_others(self, folder: str, question: str) -> None:
        scored = Scored(load_model(folder), ["x", *CHUNKS[:2]], question)
        found = scores(scored, replace(some_heads(scored.runtime), sinks=50))
        assert all(bool(score.isfinite().all()) for score in found)


def clip(**settings: Any) -> Method:
    """CacheClip with another look, on chunks right behind the prefix."""
    return vary(preset("cacheclip"), {"scorer": settings, "chunk_context": "prefix"})


class TestFiles:
    def test_round_trip(self, tmp_path: Path) -> None:
        heads = HeadSet(SHA, ((0, 1), (2, 0)), torch.tensor([0.25, 0.75]), sinks=3, about={"seed": 7, "data": ["x"]})
        heads.save(tmp_path / "heads.safetensors")
        found = HeadSet.load(tmp_path / "heads.safetensors")
        for name in ("about", "heads", "sinks"):
            assert getattr(found, name) == getattr(heads, name)
        assert found.digest() == heads.digest() and torch.equal(found.weights, heads.weights)

    def test_the_digest_covers_what_decides_scores(self) -> None:
        heads = HeadSet(SHA, ((0, 1), (2, 0)), torch.tensor([0.25, 0.75]))
        others = [
            replace(heads, auxiliary_sha256="b" * 64),
            replace(heads, heads=((0, 1), (2, 1))),
            replace(heads, weights=torch.tensor([0.5, 0.5])),
            replace(heads, sinks=1),
        ]
        assert len({each.digest() for each in (heads, *others)}) == 5
        assert replace(heads, about={"x": 1}).digest() == heads.digest()

    def test_bad_files_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "heads.safetensors"

        def refused(message: str) -> None:
            with pytest.raises(ModelError, match=message):
                HeadSet.load(path)

        refused("no head set at .*cacheclip finetune")
        path.write_bytes(b"rubbish")
        refused("cannot be read")
        HeadSet(SHA, ((0, 1),), torch.tensor([1.0])).save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused("it is damaged")
        header = {"format": "99", "auxiliary_sha256": SHA, "heads": json.dumps([[0, 1]]), "about": "{}", "sha256": "x"}
        path.write_bytes(whole)
        save_file(load_file(path), path, metadata=header)
        refused("its format is 99, this version reads 1")


def with_heads(config: EngineConfig, heads: HeadSet) -> CacheClipEngine:
    engine = CacheClipEngine(config)
    engine.parts.use_heads(heads)
    return engine


class TestEngine:
    @pytest.fixture
    def config(self, tiny_models: dict[str, str]) -> EngineConfig:
        return EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"], **CACHECLIP)

    @pytest.fixture
    def heads(self, config: EngineConfig) -> HeadSet:
        return some_heads(CacheClipEngine(config).auxiliary)

    def test_one_of_another_model_is_refused(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        path = head_set_path(heads.auxiliary_sha256, weights_digest(CacheClipEngine(config).primary.fingerprint))
        replace(heads, auxiliary_sha256=SHA).save(path)
        with pytest.raises(ModelError, match="made for an auxiliary model with digest aaaaaaaaaaaa"):
            _ = CacheClipEngine(config).head_set
        replace(heads, heads=((0, 1), (1, 0), (99, 1))).save(path)
        with pytest.raises(ModelError, match="does not have"):
            _ = CacheClipEngine(config).head_set

    def test_where_it_is_looked_for(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pair's, then the package's, then none."""
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path / "home"))
        monkeypatch.setattr(module, "_SHIPPED", tmp_path / "shipped")
        engine = CacheClipEngine(config)
        auxiliary, primary = engine.auxiliary, engine.primary.fingerprint
        assert engine.head_set is None
        of_package, of_pair, own = (
            replace(heads, weights=torch.tensor(w)) for w in ([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])
        )
        of_package.save(tmp_path / "shipped" / f"{model_digest(auxiliary)[:16]}.safetensors")
        assert find_head_set(auxiliary, primary).digest() == of_package.digest()  # type: ignore[union-attr]
        of_pair.save(head_set_path(heads.auxiliary_sha256, weights_digest(primary)))
        assert find_head_set(auxiliary, primary).digest() == of_pair.digest()  # type: ignore[union-attr]

    def test_it_decides_what_is_recomputed_and_certified(self, config: EngineConfig, heads: HeadSet) -> None:
        tuned, plain = with_heads(config, heads), CacheClipEngine(config)
        found = []
        for engine in (tuned, plain):
            engine.precompute(CHUNKS)
            found.append([engine.prefill(PROMPT, method=method).logits for method in (clip(), clip(layers="last"))])
        assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[1][0], found[1][1])
        assert not torch.equal(found[0][0], found[0][1])
        for name, is_other in (("cacheclip", True), ("direct", False)):
            one, other = (each.parts.certificates.identity(preset(name)).digest() for each in (tuned, plain))
            assert (one != other) == is_other

    def test_the_default_method_asks_the_auxiliary_where_it_has_one(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = replace(config, method="auto", min_confidence=0.0)
        without_heads = CacheClipEngine(config)
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        heads.save(head_set_path(heads.auxiliary_sha256, weights_digest(without_heads.primary.fingerprint)))
        own = CacheClipEngine(config)
        assert own.make_method() == own.make_method("auto") == preset("cacheclip")
        assert own.make_method("auto", 0.5).nominal_ratio == 0.5
        own.precompute(CHUNKS)
        prompt, one_token = PROMPT, SamplingParams(max_tokens=1)
        assert own.generate(prompt, one_token).stats.method == "cacheclip"
        assert own.generate(prompt, one_token, method="auto").stats.method == "cacheclip"
        without_heads.parts.use_heads(None)
        for engine in (without_heads, CacheClipEngine(config, auxiliary=None)):
            engine.precompute(CHUNKS)
            assert engine.generate(prompt, one_token).stats.method == "epic-corrected"
        measured = bench(
            own.config, methods=["auto", "cacheclip", "direct"], context_tokens=64, chunk_tokens=32, runs=1
        )
        assert list(measured["methods"]) == ["cacheclip", "direct"]
        with pytest.raises(ConfigurationError, match="method must be auto, a Method or one of full"):
            own.generate(prompt, one_token, method="auto:anchor=0.3")

    def test_methods_may_ask_for_others_by_name_or_file(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each as an engine of these settings has it, side by side in one; read once."""
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        weights = {"a": [1.0, 0, 0], "b": [0, 0, 1.0]}
        sets = {name: replace(heads, weights=torch.tensor(each)) for name, each in weights.items()}
        for name, each in sets.items():
            each.save(tmp_path / "heads" / f"{name}.safetensors")

        def logits(engine: CacheClipEngine, method: Method) -> torch.Tensor:
            return engine.prefill(PROMPT, method=method).logits

        engine = with_heads(config, sets["a"])
        engine.precompute(CHUNKS)
        reads = spied(monkeypatch, HeadSet, "load")
        for name in "ab":
            alone = with_heads(config, sets[name])
            alone.precompute(CHUNKS)
            expected = logits(alone, clip())
            before = len(reads)
            for named in (clip(heads=name), clip(heads=f"{tmp_path}/heads/{name}.safetensors")):
                assert torch.equal(logits(engine, named), expected) and torch.equal(logits(engine, named), expected)
            assert len(reads) - before == 2, "by name and by file"
        assert torch.equal(logits(engine, clip()), logits(engine, clip(heads="a")))
        assert torch.equal(logits(engine, clip(heads="none")), logits(engine, clip(layers="last")))
        assert not torch.equal(logits(engine, clip(heads="a")), logits(engine, clip(heads="b")))
        assert not torch.equal(logits(engine, clip(heads="a")), logits(engine, clip(heads="none")))

    def test_a_certificate_is_about_what_a_name_stands_for(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        method = clip(heads="own")
        digests = []
        for weights in ([1.0, 0, 0], [0, 0, 1.0], [1.0, 0, 0]):
            replace(heads, weights=torch.tensor(weights)).save(tmp_path / "heads" / "own.safetensors")
            digests.append(CacheClipEngine(config).parts.certificates.identity(method).digest())
        assert digests[0] == digests[2] != digests[1]

    def test_a_name_that_means_nothing_is_told_before_anything_is_computed(
        self, config: EngineConfig, heads: HeadSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CACHECLIP_HOME", str(tmp_path))
        engine = CacheClipEngine(config)
        with pytest.raises(ModelError, match="no head set named 'tuned': expected .*tuned.safetensors, .* holds none"):
            engine.generate("What is it?", method=clip(heads="tuned"))
        heads.save(tmp_path / "heads" / "calibrated.safetensors")
        (tmp_path / "heads" / ".tmp-1.safetensors").write_bytes(b"")
        with pytest.raises(ModelError, match=r"holds calibrated\. Make it with 'cacheclip finetune --out "):
            engine.generate("What is it?", method=clip(heads="tuned"))
        with pytest.raises(ModelError, match="no head set at .*nothing.safetensors"):
            load_named("./nothing.safetensors")
        replace(heads, auxiliary_sha256=SHA).save(tmp_path / "heads" / "foreign.safetensors")
        with pytest.raises(ModelError, match="head set 'foreign' was made for an auxiliary model with digest aaaaaaa"):
            engine.generate("What is it?", method=clip(heads="foreign"))
        (tmp_path / "heads" / "broken.safetensors").write_bytes(b"nothing of the kind")
        with pytest.raises(ModelError, match="broken.safetensors cannot be read"):
            engine.generate("What is it?", method=clip(heads="broken"))

    def test_names_stay_in_their_folder(self) -> None:
        for name in ("auto", "none", "tuned", "qwen2.5-0.5b_v2", "./own.safetensors", "/tmp/own", "~/own"):
            check_head_set_name(name)
        for wrong in ("", ".", "..", ".own", "-own", "a b", "a\\b", "a\n", "\u00e9", "a:b", None, 3):
            with pytest.raises(ConfigurationError, match="heads must be auto, none, a name of letters"):
                check_head_set_name(wrong)  # type: ignore[arg-type]
        for settings in ({"heads": ".."}, {"heads": "own", "layers": "last"}, {"heads": "none", "layers": "all"}):
            with pytest.raises(ConfigurationError, match="heads"):
                clip(**settings)

    def test_chunk_caches_do_not_depend_on_it(self, config: EngineConfig, heads: HeadSet, tmp_path: Path) -> None:
        stored = replace(config, store=tmp_path / "store")
        assert CacheClipEngine(stored).precompute(CHUNKS)
        assert not with_heads(stored, heads).precompute(CHUNKS)

    @pytest.mark.parametrize("settings", [{"layers": "all"}, {"layers": "0"}])
    def test_settings_of_the_look_change_the_choice(self, config: EngineConfig, settings: dict[str, Any]) -> None:
        engine = CacheClipEngine(config)
        engine.precompute(CHUNKS)
        prompt = "\n\n".join([*CHUNKS, "What is the magic number, said the keeper?"])
        one, other = (
            engine.prefill(prompt, method=vary(method, {"budget": {"chunk_starts": 0.0}}))
            for method in (clip(), clip(**settings))
        )
        assert not torch.equal(one.logits, other.logits)
        assert one.stats.recomputed_tokens == other.stats.recomputed_tokens
