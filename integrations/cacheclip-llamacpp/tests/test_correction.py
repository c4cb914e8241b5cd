"""The correction in llama.cpp: what is read of the bytes that it writes, how it rotates keys, and what is added."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_llamacpp import model, rotary, written
from cacheclip_llamacpp.late_correction import LateCorrection
from cacheclip_llamacpp.weights import GgufWeights
from cacheclip_llamacpp.written import UnknownLayoutError, WrittenKV
from cacheclip_testing.plugin import CHUNKS
from tiny_gguf import ARCHITECTURES, PROMPT, TOLERANCE, MakeEngine, logits

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.methods import preset
from cacheclip_rag.runtime import Tables, rotate
from cacheclip_rag.runtime.transformers.rotary import unrotate

WEIGHT = 0.5
CORRECTED = replace(preset("epic"), name="corrected", correction=WEIGHT).at(0.3)
PLAIN = preset("epic").at(0.3)


def tables_of(files: dict[str, Path], architecture: str, positions: torch.Tensor) -> list[Tables]:
    """The rotary tables of transformers' model, in the order of layers in which llama.cpp writes them: those without a
    window first."""
    model = CacheClipEngine(primary=str(files[architecture].parent / "model"), auxiliary=None, method="direct").primary
    found: Any = model.rotary.tables(positions)
    return [*found[5:], *found[:5]] if architecture == "gemma3" else found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
class TestRotation:
    def test_is_that_of_the_model(self, make: MakeEngine, files: dict[str, Path], architecture: str) -> None:
        runtime: Any = make(architecture).primary
        positions = torch.tensor([0, 1, 7, 100, 1500])
        expected = tables_of(files, architecture, positions)
        assert sorted(n for each in runtime.rotations for n in each.layers) == list(range(len(expected)))
        for each in runtime.rotations:
            for layer in each.layers:
                for own, theirs in zip(each.tables(positions)[:2], expected[layer][:2], strict=True):
                    assert float((own - theirs).abs().max()) < 0.02

    def test_of_another_kind_is_not_taken(
        self, make: MakeEngine, architecture: str, monkeypatch: Any, caplog: Any
    ) -> None:
        """Its keys then differ by more than a rotation, and nothing is corrected."""
        right = GgufWeights.rotates_pairs.fget
        monkeypatch.setattr(GgufWeights, "rotates_pairs", property(lambda self: not right(self)))  # type: ignore[misc]
        engine = make(architecture)
        engine.precompute(CHUNKS)
        assert torch.allclose(logits(engine, PROMPT, CORRECTED), logits(engine, PROMPT, PLAIN), atol=1e-3)
        assert [record.getMessage() for record in caplog.records if "is not corrected" in record.getMessage()]


class Recorded(LateCorrection):
    """Keeps what was there before."""

    made: list["Recorded"] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before = [
            [[c.stored.take([n], v)[0] for v in (False, True)] for n in range(c.stored.num_layers)]
            for c in self._chunks
        ]
        self.made.append(self)

    def __call__(self, state: Any) -> None:
        self.state = state
        super().__call__(state)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_added(make: MakeEngine, files: Any, architecture: str, seed: int, monkeypatch: Any) -> None:
    """Each token that is not recomputed gets half of the mean change of those of its chunk that are, before rotation;
    nothing else changes."""
    monkeypatch.setattr(model, "LateCorrection", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    engine = make(architecture)
    engine.precompute(CHUNKS)
    chance = random.Random(seed)
    prompt = "\n\n".join(["Read:", *chance.sample(CHUNKS, 3), chance.choice(CHUNKS)[30:], "And then?"])
    kept = engine.prefill(prompt, method=CORRECTED)
    [made] = Recorded.made
    runtime, num_added = engine.primary, 0
    for chunk, before in zip(made._chunks, made.before, strict=True):
        after = runtime.written(made.state, chunk.start, chunk.stop)
        rows = torch.cat([torch.arange(*run) for run in chunk.recomputed]) - chunk.start
        stale = torch.cat([torch.arange(*run) for run in chunk.stale]) - chunk.start
        expected = tables_of(files, architecture, torch.arange(chunk.start, chunk.stop))
        for layer, tables in enumerate(expected):
            form = next(each for each in runtime.rotations or [] if layer in each.layers)
            for is_key in (True, False):
                old, new = before[layer][not is_key].float(), after.take([layer], not is_key)[0].float()
                if is_key:
                    one = replace(form, layers=(layer,))
                    old, new = (
                        unrotate(one.heads(each[None]), tables).transpose(0, 1).flatten(1) for each in (old, new)
                    )
                change = WEIGHT * (new[rows] - old[rows]).mean(0)
                assert torch.allclose(new[stale], old[stale] + change, atol=0.02, rtol=0.02), (layer, is_key)
                num_added += int((change.abs() > 0.05).sum())
    assert num_added > 20, "the comparison sees what is added"
    del kept  # and with it the cells


def test_answers_are_those_of_corrected_kv(make: MakeEngine) -> None:
    """The prompt's last tokens see it; without a correction, with all or none recomputed, nothing is written."""
    engine = make()
    engine.precompute(CHUNKS)
    corrected, plain = (logits(engine, PROMPT, method) for method in (CORRECTED, PLAIN))
    assert float((corrected - plain).abs().max()) > TOLERANCE
    for ratio in (0.0, 1.0):
        same = [logits(engine, PROMPT, method.at(ratio)) for method in (CORRECTED, PLAIN)]
        assert torch.allclose(*same, atol=1e-3)
    answer = engine.generate(PROMPT, method=CORRECTED, max_tokens=8)
    assert answer.token_ids == engine.generate(PROMPT, method=CORRECTED, max_tokens=8).token_ids


def test_bytes_of_another_layout(make: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Answers come without a correction, and a warning says so once."""
    monkeypatch.setattr(written, "_FLOAT16", 2)
    engine = make()
    engine.precompute(CHUNKS)
    plain = logits(engine, PROMPT, PLAIN)
    for _ in range(2):
        assert torch.allclose(logits(engine, PROMPT, CORRECTED), plain, atol=1e-3)
    assert sum("in an unknown way" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_damaged_bytes_are_read_as_far_as_they_make_sense(make: MakeEngine, architecture: str) -> None:
    runtime: Any = make(architecture).primary
    state, _ = runtime.prefill(torch.arange(5, 60), 60)
    data, chance = bytes(runtime.written(state.cells, 3, 50).data), random.Random(1)
    for _ in range(300):
        damaged = bytearray(data)
        if chance.random() < 0.3:
            del damaged[chance.randrange(len(data)) :]
        else:
            damaged[chance.choice((chance.randrange(len(data)), chance.randrange(700)))] ^= 1 << chance.randrange(8)
        try:
            found = WrittenKV(damaged, 3, 50)
        except UnknownLayoutError:
            continue
        assert found.take([0], True).shape[1] == 47
    same = WrittenKV(data, 3, 50)
    for layer in range(runtime.num_layers):
        for is_value in (False, True):
            same.put([layer], is_value, same.take([layer], is_value))
    assert bytes(same.data) == data


def test_rotations_of_long_contexts_are_measured_far_out() -> None:
    assert rotary.measured_positions(2048) == [0, 1, 8, 64, 512]
    assert rotary.measured_positions(10**6)[-1] == 8**4


def test_a_rotated_key_is_rotated_back() -> None:
    """Pairs and halves, of a part of the head, too."""
    for in_pairs in (False, True):
        form = rotary.Rotation((0, 1), torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), 8, in_pairs)
        keys = torch.randn(2, 5, 24)
        tables = form.tables(torch.arange(5))
        assert torch.allclose(form.rows(unrotate(rotate(form.heads(keys), tables), tables)), keys, atol=1e-5)
