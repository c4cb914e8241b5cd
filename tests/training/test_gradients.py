"""Passes with gradients give what the engine's own passes give, and their gradients are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.chunks.context import CONTEXTS
from cacheclip_rag.lab.training.gradients import LayerKV, Part, Rows, encode_chunks, read_prompt
from cacheclip_rag.methods import preset
from cacheclip_rag.prompt.layout import Layout, lay_out
from tests.conftest import CHUNKS
from tests.fusion.cases import BROKEN, EXACT, KINDS, gap

ARCHITECTURES = (*KINDS, "qwen2-rope-yarn", "phi3-partial", "smollm3")
TEXTS = CHUNKS[:3]
PASSAGES = "passages"
PROMPT = "Read this.\n\n" + "\n\n".join(TEXTS) + "\n\nQuestion: What is the magic number?"


@dataclass(frozen=True)
class Laid:
    """A prompt over chunks that an engine has stored behind the passages, laid open."""

    engine: CacheClipEngine
    layout: Layout
    before: list[LayerKV]
    """KV that each chunk was encoded behind."""

    @property
    def end(self) -> int:
        return self.layout.chunks[-1].stop

    @property
    def ids(self) -> torch.Tensor:
        return self.layout.ids[: self.end]

    @property
    def closing(self) -> torch.Tensor:
        return self.layout.ids[self.end :]

    @property
    def tokens(self) -> list[torch.Tensor]:
        return [torch.tensor(span.tokens.ids) for span in self.layout.chunks]

    @property
    def fresh(self) -> torch.Tensor:
        """``(num_tokens,)`` bool: tokens of the common part that are neither prefix nor chunk."""
        found = torch.ones(self.end, dtype=torch.bool)
        found[: self.layout.num_prefix] = False
        for span in self.layout.chunks:
            found[span.start : span.stop] = False
        return found

    def base(self, encoded: Sequence[LayerKV], shift: int = 0) -> list[LayerKV]:
        """KV of the common part: the prefix, and the chunks' KV, moved by ``shift`` tokens within each chunk."""
        prefix = self.engine.parts.prefix_caches.prefix
        num_prefix, found = self.layout.num_prefix, []
        for number, of_chunks in enumerate(encoded):
            pair = []
            for which, kv in enumerate(of_chunks):
                whole = kv.new_zeros(kv.shape[0], self.end, kv.shape[2])
                whole[:, :num_prefix] = prefix[number, which, :, :num_prefix]
                pieces = kv.split([len(each) for each in self.tokens], dim=1)
                for span, piece in zip(self.layout.chunks, pieces, strict=True):
                    whole[:, span.start : span.stop] = piece.roll(shift, dims=1)
                pair.append(whole)
            found.append((pair[0], pair[1]))
        return found

    def last(self, base: Sequence[LayerKV], rows: torch.Tensor, *rest: object, endings: int = 1) -> torch.Tensor:
        """Logits of each ending's last row."""
        stops = len(rows) + len(self.closing) * torch.arange(1, endings + 1)
        with torch.no_grad():
            of = Rows(rows, [self.closing] * endings, stops - 1)
            logits, _ = read_prompt(self.engine.primary, self.ids, base, of, *rest, hidden=False)
        return logits


@pytest.fixture
def laid(tiny_models: dict[str, str]) -> Callable[[str], Laid]:
    def make(name: str) -> Laid:
        engine = CacheClipEngine(
            primary=tiny_models[name], auxiliary=None, method="direct", chunk_context=PASSAGES, prefix_cache_bytes=0
        )
        engine.precompute(TEXTS)
        segments = engine.segment(PROMPT)
        caches = engine.parts.prefix_caches
        layout = lay_out(segments, engine.primary, caches.tokenize, caches.prefix_ids)
        before = engine.parts.primary(CONTEXTS[PASSAGES]).prefix
        for parameter in engine.primary.model.parameters():
            parameter.requires_grad_(False)
        return Laid(engine, layout, [(each[0], each[1]) for each in before])

    return make


def prefill(case: Laid, method: object) -> torch.Tensor:
    logits: torch.Tensor = case.engine.prefill(PROMPT, method=method).logits  # type: ignore[arg-type]
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_passes_equal_the_engines_own(laid: Callable[[str], Laid], name: str) -> None:
    case = laid(name)
    with torch.no_grad():
        encoded = encode_chunks(case.engine.primary, case.tokens, case.before)
        beside = encode_chunks(case.engine.primary, case.tokens, [(k[:, 1:], v[:, 1:]) for k, v in case.before])
    stored = torch.cat([case.engine.chunk_caches()[0].read(text).tensor() for text in TEXTS], dim=3)  # type: ignore[union-attr]
    mine, wrong = (torch.stack([torch.stack(pair) for pair in each]) for each in (encoded, beside))
    assert gap(mine, stored) < EXACT < BROKEN < gap(wrong, stored)

    fresh = case.fresh.nonzero().flatten()
    direct = prefill(case, preset("direct"))
    found = case.last(case.base(encoded), fresh, endings=2)
    assert gap(found[0], direct) < EXACT and gap(found[1], direct) < EXACT, "one ending does not see the other"
    assert gap(case.last(case.base(encoded, shift=1), fresh)[0], direct) > BROKEN, "chunks at wrong positions"

    full = prefill(case, preset("full"))
    everything = torch.arange(case.layout.num_prefix, case.end)
    assert gap(case.last(case.base(encoded), everything)[0], full) < EXACT < gap(direct, full)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_a_corrected_read_equals_the_engines_own(laid: Callable[[str], Laid], name: str) -> None:
    case = laid(name)
    method = replace(preset("epic").at(0.3), correction=0.5)  # type: ignore[type-var]
    corrected = prefill(case, method)
    answer = case.engine.generate(PROMPT, SamplingParams(max_tokens=1), method=method, trace=True)
    assert answer.trace is not None and answer.trace.recomputed
    computed = case.fresh.clone()
    computed[list(answer.trace.recomputed)] = True
    rows = computed.nonzero().flatten()
    parts = []
    for span in case.layout.chunks:
        slots = torch.arange(span.start, span.stop)
        chosen, stale = slots[computed[slots]], slots[~computed[slots]]
        parts.append(Part(chosen, torch.searchsorted(rows, chosen), stale))
    with torch.no_grad():
        base = case.base(encode_chunks(case.engine.primary, case.tokens, case.before))
    assert gap(case.last(base, rows, parts, 0.5)[0], corrected) < EXACT
    assert gap(case.last(base, rows, parts, 0.0)[0], corrected) > EXACT, "without the correction"
    wrong = [replace(part, rows=part.rows - 1) for part in parts]
    assert gap(case.last(base, rows, wrong, 0.5)[0], corrected) > EXACT, "the change of other rows"


@pytest.mark.parametrize("name", ["llama", "qwen2-sliding"])
def test_gradients_are_those_of_finite_differences(laid: Callable[[str], Laid], name: str) -> None:
    case = laid(name)
    runtime, lead = case.engine.primary, case.before
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(kv.shape, generator=generator) for kv in lead[1]]
    fresh = case.fresh.nonzero().flatten()
    rows = Rows(fresh, [case.closing], torch.tensor([len(fresh) + len(case.closing) - 1]))
    slots = torch.cat([torch.arange(span.start, span.stop) for span in case.layout.chunks])

    def loss(moved: Sequence[torch.Tensor]) -> torch.Tensor:
        encoded = encode_chunks(runtime, case.tokens, [*lead[:1], (moved[0], moved[1]), *lead[2:]])
        empty = case.base([(k.detach(), v.detach()) for k, v in encoded])
        base = [
            (keys.index_copy(1, slots, k), values.index_copy(1, slots, v))
            for (keys, values), (k, v) in zip(empty, encoded, strict=True)
        ]
        logits, _ = read_prompt(runtime, case.ids, base, rows)
        return logits[0].double().log_softmax(-1)[3]

    begin = [kv.clone().requires_grad_() for kv in lead[1]]
    loss(begin).backward()
    slope = sum(float((kv.grad * by).sum()) for kv, by in zip(begin, direction, strict=True))
    with torch.no_grad():
        ahead, back = (
            float(loss([kv + step * by for kv, by in zip(lead[1], direction, strict=True)])) for step in (2e-3, -2e-3)
        )
    assert (ahead - back) / 4e-3 == pytest.approx(slope, rel=2e-2)
    assert abs(slope) > 1e-2
