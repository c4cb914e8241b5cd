"""Which reused chunks count as exact, compared with the KV that an unmodified transformers model computes."""

from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.base.keys import is_key
from tests.conftest import QUESTION, some_of
from tests.fusion.cases import (
    BROKEN,
    EXACT,
    KINDS,
    gap,
    make_engine,
    prefilled,
    reference_logits,
    run_reference,
    stored_kv,
)
from tests.fusion.test_parts import TEXTS

LONG, OTHER = TEXTS[2], TEXTS[0]
CUT = LONG.index(" ", 100)
"""Where a token begins, in the text as in a prompt that begins there."""
PLACES: dict[str, tuple[str, str]] = {
    "whole": (LONG, "prefix"),
    "beginning": (LONG[:300], "prefix"),
    "middle": (LONG[CUT:-60], "prefix"),
    "end": (LONG[CUT:], "prefix"),
    "middle, then another": (f"{LONG[CUT:-60]}\n\n{OTHER}", "prefix"),
    "two": (f"{LONG}\n\n{OTHER}", "prefix"),
    "after a word": (f"Read: {LONG}", "prefix"),
    "of passages": (LONG, "passages"),
    "middle, of passages": (LONG[CUT:-60], "passages"),
    "without the prefix": (LONG, "prefix"),
}
"""What the user's text begins with, right behind the shared prefix, and the chunk context."""
RIGHT = {"whole", "beginning", "two"}
"""Those whose first chunk has full prefill's KV."""


@torch.inference_mode()
def gaps(engine: CacheClipEngine, folder: str, plan: Any) -> list[float]:
    """Per reused chunk, how far its stored KV is from full prefill's, at its place in the prompt."""
    caches, layout, found = engine.chunk_caches()[0], plan.layout, list[float]()
    computed = run_reference(folder, layout.ids)
    for span in plan.reused:
        cache: Any = engine.primary.new_cache(layout.num_tokens)  # type: ignore[attr-defined]
        cache.fill_all([(span.start, stored_kv(caches, span))])
        here = slice(span.start, span.stop)
        pairs = [
            (own, right)
            for mine, theirs in zip(cache.layers, computed.layers, strict=True)
            for own, right in ((mine.keys, theirs.keys), (mine.values, theirs.values))
        ]
        found.append(max(gap(own[:, :, here], right[:, :, here]) for own, right in pairs))
    return found


@pytest.mark.some(6)
@some_of(3, kind=KINDS, place=PLACES)
def test_what_counts_as_exact_has_full_prefills_kv(kind: str, place: str, tiny_models: dict[str, str]) -> None:
    begins, context = PLACES[place]
    engine = make_engine(tiny_models[kind], tiny_models["auxiliary"], chunk_context=context)
    engine.precompute([LONG, OTHER])
    as_it_stands = [Chunk(LONG), Fresh(f"\n\n{QUESTION}")]
    prompt: Any = as_it_stands if place == "without the prefix" else f"{begins}\n\n{QUESTION}"
    plan = engine.plan(prompt)
    found = gaps(engine, tiny_models[kind], plan)
    assert [span in plan.exact for span in plan.reused] == [each < EXACT for each in found]
    assert all(each < EXACT or each > BROKEN for each in found), "or the comparison shows nothing"
    assert [each < EXACT for each in found] == [place in RIGHT, *[False] * (len(found) - 1)]
    assert (plan.reused[0].start == plan.layout.num_prefix) == (place != "after a word")
    pieces = [piece for piece in plan.to_dict()["pieces"] if piece["reused"]]
    assert [piece["exact"] for piece in pieces] == [each < EXACT for each in found]
    assert all(is_key(piece["key"]) for piece in pieces)

    answer = prefilled(engine, prompt, "cacheclip", 1.0)  # computes all tokens again, but those of exact chunks
    assert gap(answer.logits, reference_logits(tiny_models[kind], plan.layout.ids)) < EXACT
    assert answer.stats.exact_tokens == sum(len(span.tokens) for span in plan.exact)
    assert answer.is_exact
