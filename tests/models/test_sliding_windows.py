"""The border of a sliding window: plain prefill and decoding, token by token across it, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing.tiny import tiny_spec

from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.attention import query_attention
from cacheclip_rag.runtime.transformers.attention_pattern import AttentionRule, causal_pattern
from tests.conftest import build_model
from tests.fusion.cases import BROKEN, EXACT, gap, reference_logits, reference_model

MODELS = ["mistral-sliding", "phi3-sliding", "qwen2-sliding", "gemma2", "gemma3", "gpt-oss"]
"""With windows in every layer or in every other one; stock attention, soft-capped, and with sinks."""


@pytest.fixture(params=MODELS)
def sliding(request: pytest.FixtureRequest, tiny_models: dict[str, str]) -> str:
    return tiny_models[request.param]


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(count))


def window_of(runtime: Any) -> int:
    return int(runtime.model.config.sliding_window)


@pytest.mark.some(3)
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_prefill_at_the_border(sliding: str, more: int) -> None:
    runtime = load_model(sliding)
    ids = tokens(window_of(runtime) + more)
    assert gap(runtime.prefill(ids, 200)[1], reference_logits(sliding, ids)) < EXACT


def test_prefill_of_several_blocks_of_rows(sliding: str) -> None:
    ids = tokens(300)
    assert gap(load_model(sliding).prefill(ids, 310)[1], reference_logits(sliding, ids)) < EXACT


def test_decoding_across_the_border(sliding: str) -> None:
    """From two tokens below to three above, each step against a prompt read anew."""
    runtime = load_model(sliding)
    window = window_of(runtime)
    ids = tokens(window + 3)
    cache, logits = runtime.prefill(ids[: window - 2], 200)
    for length in range(window - 2, window + 4):
        assert gap(logits, reference_logits(sliding, ids[:length])) < EXACT, f"{length - window:+} tokens"
        if length < len(ids):
            logits = runtime.decode_step(cache, int(ids[length]))


def test_extending_across_the_border(sliding: str) -> None:
    """Several rows at once behind a partly filled cache, as after a start from the prefix cache."""
    runtime = load_model(sliding)
    window = window_of(runtime)
    ids = tokens(window + 2)
    cache, _ = runtime.prefill(ids[: window - 1], 200)
    logits = runtime.extend(cache, ids[window - 1 :], window - 1, logits_to_keep=3)
    assert logits is not None
    for row, length in enumerate((window, window + 1, window + 2)):
        assert gap(logits[row], reference_logits(sliding, ids[:length])) < EXACT


def test_twin_one_key_more_is_seen_in_the_logits(tmp_path: Path) -> None:
    """Two models that differ in nothing but a window one token wider differ right above the border, not below it."""
    narrow, folders = 24, []
    for number, width in enumerate((narrow, narrow + 1)):
        folders.append(str(build_model(tmp_path / str(number), tiny_spec("mistral", sliding_window=width))))

    assert reference_model(folders[0]).config.sliding_window == narrow
    for length, differs in ((narrow, False), (narrow + 1, True)):
        ids = tokens(length)
        difference = gap(*(load_model(folder).prefill(ids, 40)[1] for folder in folders))
        assert difference > BROKEN if differs else difference < EXACT


@pytest.mark.parametrize("num_keys", [6, 7, 8, 9])
def test_weights_of_one_row_at_the_border(num_keys: int) -> None:
    """What a probe is given of the last row: nothing outside the window, something everywhere within."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 8, generator=generator), torch.randn(2, num_keys, 8, generator=generator)
    [block] = causal_pattern(torch.tensor([num_keys - 1])).blocks
    weights = query_attention(query, key, block, AttentionRule(0.3, window=7))
    outside = max(0, num_keys - 7)
    assert bool((weights[..., :outside] == 0).all()) and bool((weights[..., outside:] > 0).all())
