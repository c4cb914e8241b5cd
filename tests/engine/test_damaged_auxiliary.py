"""A chunk cache of the auxiliary model that is damaged when it is read is computed again as it was stored."""

import pytest
import torch

from cacheclip_rag import SamplingParams
from tests.conftest import Make, Patch, lose, rag_prompt
from tests.fusion.cases import gap

RATIOS = (0.1, 0.2, 0.3, 0.5)
"""At each another token is on the border between those that are chosen and those that are not."""


@pytest.mark.some(2)
@pytest.mark.parametrize("context", ["prefix", "passages"])
def test_it_is_computed_in_its_own_context(make: Make, chunks: list[str], monkeypatch: Patch, context: str) -> None:
    """Lossless codecs, so that nothing but what the chunk is computed behind can change what is chosen."""
    engine = make(
        stored=chunks, chunk_context=context, codec="float32", system_prompt="Answer from the texts, and briefly."
    )

    def asked() -> list[torch.Tensor]:
        found = []
        for ratio in RATIOS:
            prompt, params = rag_prompt(chunks), SamplingParams(max_tokens=1)
            prefilled = engine.prefill(prompt, params, method=engine.make_method("cacheclip", ratio))
            assert prefilled.stats.hits == len(chunks) and prefilled.stats.recomputed_tokens
            found.append(prefilled.logits)
        return found

    whole = asked()
    lose(monkeypatch, engine.parts.models.auxiliary_caches, *chunks)  # as of an entry whose checksum is wrong
    for damaged, expected in zip(asked(), whole, strict=True):
        assert gap(damaged, expected) < 1e-5
    assert all(gap(one, other) > 1e-3 for one, other in zip(whole, whole[1:], strict=False)), "what is chosen shows"
