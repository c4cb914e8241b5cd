"""Layers that convolve: their inputs are kept like KV, and rows anywhere in a cache see those before them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import build_model, tiny_spec
from transformers.cache_utils import Cache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheclip_rag.base.errors import ConfigurationError, UnsupportedModelError
from cacheclip_rag.models.load import load_model, unload_models
from cacheclip_rag.runtime.transformers import short_convolution
from cacheclip_rag.runtime.transformers.short_convolution import _Inputs, _Room, _ShortConvolution
from cacheclip_rag.selection import pick_layers
from cacheclip_rag.selection.auxiliary_pass import score_chunks
from tests.conftest import CHUNKS, spied
from tests.fusion.cases import EXACT, Case, gap, make_case, prefilled, reference_greedy, reference_logits
from tests.models import test_passes

_LAYERS = ["conv", "full_attention", "conv"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"architecture": "lfm2", "layer_types": _LAYERS},
    "lfm2-attention-last": {"architecture": "lfm2", "layer_types": ["conv", "conv", "full_attention"]},
    "lfm2-wide": {"architecture": "lfm2", "layer_types": _LAYERS, "hidden_size": 96, "conv_L_cache": 5},
    "lfm2-undivided": {"architecture": "lfm2", "layer_types": _LAYERS, "hidden_size": 54, "conv_bias": True},
    "lfm2-moe": {"architecture": "lfm2_moe", "layer_types": _LAYERS, **_EXPERTS},
    "lfm3": {"architecture": "lfm3", "layer_types": _LAYERS},
}
"""Inputs as wide as keys and values together, wider, and of a size that no number of heads divides."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def built(name: str) -> str:
        spec = dict(MODELS[name])
        if spec["architecture"] not in CONFIG_MAPPING or not hasattr(Cache, "update_conv_state"):
            pytest.skip("this transformers has no such layers, or keeps their state in another way")
        folder = tmp_path_factory.getbasetemp() / f"convolving-{name}"
        if not folder.is_dir():
            build_model(folder, tiny_spec(spec.pop("architecture"), **spec))
        return str(folder)

    return built


@pytest.fixture(scope="module")
def case(folders: Callable[[str], str], tiny_models: dict[str, str], request: pytest.FixtureRequest) -> Case:
    return make_case(folders(getattr(request, "param", "lfm2")), tiny_models["auxiliary"], CHUNKS[:3])


@pytest.mark.parametrize("case", MODELS, indirect=True)
class TestExact:
    @pytest.mark.some(3)
    def test_recomputed_in_full(self, case: Case) -> None:
        segments = [span.segment for span in case.layout.spans]
        expected = reference_logits(case.folder, case.layout.ids)
        fused, direct = prefilled(case.engine, segments, "cacheclip", 1.0), prefilled(case.engine, segments, "direct")
        assert fused.stats.fallback is None and fused.stats.hits == 3
        assert gap(fused.logits, expected) < EXACT * float(expected.abs().max()) < gap(direct.logits, expected)

    @pytest.mark.some(3)
    def test_scattered_rows(self, case: Case) -> None:
        """One by one, in order, in the KV of other texts."""
        rows = case.rows(0.15)
        assert int((rows[1:] != rows[:-1] + 1).sum()) > 5
        together, alone = case.assembled(), case.assembled()
        logits = case.runtime.run_slots(together, case.layout.ids[rows], rows)
        for row in rows:
            expected = case.runtime.run_slots(alone, case.layout.ids[row : row + 1], row[None])
        assert gap(logits, expected) < EXACT * float(expected.abs().max())
        for layer, other in zip(together.layers, alone.layers, strict=True):
            assert gap(layer.keys, other.keys) < EXACT * float(other.keys.abs().max())

    @pytest.mark.some(3)
    def test_in_two_parts_and_decoded(self, case: Case) -> None:
        ids, runtime = case.layout.ids, case.runtime
        cache = runtime.new_cache(8)  # it grows
        runtime.extend(cache, ids[:30], 0, head=False)
        logits = [runtime.extend(cache, ids[30:], 30)]
        tokens = reference_greedy(case.folder, ids, 3)
        logits += [runtime.decode_step(cache, token) for token in tokens[:2]]
        assert [int(each.argmax()) for each in logits] == tokens
        other = runtime.prefill(ids[1:], len(ids))[0]  # of neighbouring length
        runtime.cut(cache, len(ids))
        steps = runtime.decode_steps([other, cache], [7, tokens[0]])
        expected = reference_logits(case.folder, torch.cat((ids[1:], torch.tensor([7]))))
        for step, alone in zip(steps, (expected, logits[1]), strict=True):
            assert gap(step, alone) < EXACT * float(alone.abs().max())

    @pytest.mark.some(4)
    @pytest.mark.parametrize("num_context", [0, 1, 9])
    def test_chunks_of_a_batch(self, case: Case, num_context: int) -> None:
        """A first token sees the end of its own context, and nothing of the chunk that lies before."""
        runtime = case.runtime
        ids = case.layout.ids.tolist()
        context = runtime.encode(ids[:num_context]) if num_context else None
        chunks = [ids[10:17], ids[20:40], ids[40:41]]
        for encoded, chunk in zip(runtime.encode_many(chunks, context), chunks, strict=True):
            expected = runtime.encode(chunk, context)
            assert gap(encoded, expected) < EXACT * float(expected.abs().max())


@pytest.mark.parametrize("case", ["lfm2-wide"], indirect=True)
def test_chunks_that_are_scored_together(case: Case) -> None:
    """As each of them alone, by the layers that attend."""
    runtime, ids = case.runtime, case.layout.ids.tolist()
    prefix = runtime.encode(ids[:1])
    chunks = [runtime.encode(part, prefix) for part in (ids[5:6], ids[9:11], ids[20:40])]
    together = score_chunks(runtime, prefix, chunks, ids[-4:])
    for scores, chunk in zip(together, chunks, strict=True):
        assert gap(scores, score_chunks(runtime, prefix, [chunk], ids[-4:])[0]) < EXACT < float(scores.min())


def test_the_last_layer(folders: Callable[[str], str]) -> None:
    """It keeps the inputs of all rows, and computes those that are needed."""
    model = folders("lfm2")
    test_passes.test_only_the_rows_whose_logits_are_asked_for(model, 3)
    test_passes.test_no_output_if_only_kv_is_needed(model)


def test_layers_share_the_places_of_a_pass(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = case.runtime.prefill(torch.arange(5, 15), 16)
    calls = spied(monkeypatch, _ShortConvolution, "_room")
    for _ in range(3):
        case.runtime.decode_step(state, 7)
    assert len(calls) == 3 < 3 * len(case.runtime.without_attention)


def test_layers_that_attend() -> None:
    assert pick_layers("last", 6, {2, 5}) == [4] and pick_layers("all", 3, {0, 2}) == [1]
    assert pick_layers("upper", 6, {0, 5}) == [3, 4] and pick_layers("3+4", 6, {0, 5}) == [3, 4]
    with pytest.raises(ConfigurationError, match=r"of layers that attend \(not 0, 5\), got '4\+5'"):
        pick_layers("4+5", 6, {0, 5})


@pytest.mark.parametrize("method", ["cacheclip", "epic-corrected", "epic"])
def test_methods_that_read_the_cache(case: Case, method: str) -> None:
    segments = [span.segment for span in case.layout.spans]
    expected = reference_logits(case.folder, case.layout.ids)
    assert gap(prefilled(case.engine, segments, method, 1.0).logits, expected) < EXACT * float(expected.abs().max())
    assert prefilled(case.engine, segments, method, 0.3).stats.hits == 3


def _placed(**changes: Callable[[_Room], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    plain = _ShortConvolution._places

    def places(*args: Any) -> _Room:
        room = plain(*args)
        return room._replace(**{name: change(room) for name, change in changes.items()})

    return lambda patch: patch.setattr(_ShortConvolution, "_places", places)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows that see no input before them": _placed(
        is_hidden=lambda places: ~torch.isin(torch.arange(len(places.rows)), places.own)
    ),
    "inputs a token late": _placed(slots=lambda places: (places.slots - 1).clamp(min=0)),
    "rows that see another text": lambda patch: patch.setattr(
        short_convolution, "_first_seen", lambda pattern, num_rows: torch.zeros(num_rows, dtype=torch.int64)
    ),
    "inputs that are not kept": lambda patch: patch.setattr(
        _Inputs, "_divided", lambda self, rows, plain=_Inputs._divided: [half * 0.5 for half in plain(self, rows)]
    ),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_refused(
    folders: Callable[[str], str], mistake: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders("lfm2")
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(UnsupportedModelError):
        load_model(folder)
    unload_models()
