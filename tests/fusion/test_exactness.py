"""The promises of exactness, per architecture: each beside a twin in which a planted mistake must show.

The reference is a plain transformers model that this library never touched, run on the same token ids.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st

from cacheclip_rag import SamplingParams
from cacheclip_rag.methods import preset, vary
from cacheclip_rag.runtime.transformers import attention, attention_pattern
from cacheclip_rag.runtime.transformers.attention import block_attention
from cacheclip_rag.runtime.transformers.attention_pattern import (
    AttentionPattern,
    AttentionRule,
    Block,
    SideBySide,
    causal_pattern,
)
from cacheclip_rag.runtime.transformers.rotary import rotate
from tests.conftest import TINY_MODELS, examples, spied
from tests.fusion.cases import (
    BROKEN,
    EXACT,
    KINDS,
    Case,
    bottom_right_plan,
    gap,
    make_case,
    make_engine,
    prefilled,
    reference_greedy,
    reference_logits,
    run_reference,
    scatter_reference,
)

RATIOS = pytest.mark.parametrize(
    ("primary", "ratio"), [*((name, 0.3) for name in TINY_MODELS), ("llama", 0.1), ("llama", 0.7)], indirect=["primary"]
)


class TestRatioOne:
    def test_logits_equal_plain_transformers(self, case: Case) -> None:
        segments = [span.segment for span in case.layout.spans]
        fused = prefilled(case.engine, segments, "cacheclip", 1.0)
        assert fused.stats.effective_ratio == 1.0 and fused.stats.fallback is None
        assert gap(fused.logits, reference_logits(case.folder, case.layout.ids)) < EXACT

    @pytest.mark.some(3)
    def test_greedy_text_equals_plain_transformers(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(case.runtime, "eos_ids", frozenset())  # a random model may end its turn at once
        segments = [span.segment for span in case.layout.spans]
        answer = case.engine.generate(segments, SamplingParams(max_tokens=8), method="cacheclip", recompute_ratio=1.0)
        expected = reference_greedy(case.folder, case.layout.ids, 8)
        assert list(answer.token_ids) == expected
        assert answer.text == case.runtime.decode_ids(expected)

    @pytest.mark.long
    def test_decoding_goes_on_as_after_full_prefill(self, case: Case) -> None:
        segments = [span.segment for span in case.layout.spans]
        fused, plain = prefilled(case.engine, segments, "cacheclip", 1.0), prefilled(case.engine, segments, "full")
        left, right = fused.logits, plain.logits
        for _ in range(16):
            assert gap(left, right) < EXACT
            token = int(right.argmax())
            assert int(left.argmax()) == token
            left, right = case.runtime.decode_step(fused.cache, token), case.runtime.decode_step(plain.cache, token)

    @pytest.mark.some(3)
    def test_twin_rows_at_wrong_positions(self, case: Case) -> None:
        rows = case.rows(1.0)
        expected = reference_logits(case.folder, case.layout.ids)
        for shift, test in ((0, lambda g: g < EXACT), (3, lambda g: g > BROKEN)):
            # every other row: were all moved alike, a sliding window would not notice
            positions = rows + shift * (rows % 2)
            logits = case.runtime.run_rows(
                case.assembled(), case.layout.ids[rows], positions, causal_pattern(rows), slots=rows
            )
            assert test(gap(logits, expected)), shift

    @pytest.mark.some(3)
    def test_bottom_right_mask_is_right_here_and_a_wrong_one_is_not(self, case: Case) -> None:
        """At ratio 1 only leading rows are left out, so even the mask aligned to the bottom-right corner is right: the
        reason why nobody noticed. Below ratio 1 it fails: ``TestPartialRecompute.test_twin_bottom_right_mask``."""
        rows = case.rows(1.0)
        expected = reference_logits(case.folder, case.layout.ids)
        assert gap(case.run(case.assembled(), rows, bottom_right_plan(rows, case.layout.num_tokens)), expected) < EXACT
        early = (rows - 5).clamp(min=0)
        past = AttentionPattern([Block.of(slice(0, len(rows)), slice(0, case.layout.num_tokens), early)])
        assert gap(case.run(case.assembled(), rows, past), expected) > BROKEN


class TestPartialRecompute:
    @RATIOS
    def test_equals_unmodified_transformers_with_explicit_mask(self, case: Case, ratio: float) -> None:
        rows = case.rows(ratio)
        ours = case.assembled()
        logits = case.run(ours, rows, causal_pattern(rows))
        theirs, expected = scatter_reference(case, rows)
        assert gap(logits, expected) < EXACT
        for left, right in zip(ours.layers, theirs.layers, strict=True):
            assert gap(left.keys, right.keys) < EXACT
            assert gap(left.values, right.values) < EXACT

    @RATIOS
    def test_engine_runs_exactly_the_selected_rows(self, case: Case, ratio: float) -> None:
        """The engine's logits are those of the reference on some selection of the right size: its own."""
        case.engine.prefixes.clear()
        segments, method = [span.segment for span in case.layout.spans], vary(preset("cacheclip"), {"correction": 0.0})
        with pytest.MonkeyPatch.context() as patched:
            calls = spied(patched, case.runtime, "run_rows")
            fused = prefilled(case.engine, segments, method, ratio)
        rows = calls[-1][2]
        assert fused.stats.recomputed_tokens == round(ratio * sum(len(s.tokens) for s in case.layout.chunks))
        assert len(rows) == fused.stats.fresh_tokens + fused.stats.recomputed_tokens
        assert gap(fused.logits, scatter_reference(case, rows)[1]) < EXACT

    def test_twin_wrong_position_or_bottom_right_mask(self, case: Case) -> None:
        """The chunks do differ from joint prefill, too, or every test above would pass on a no-op."""
        rows = case.rows(0.3)
        right = case.run(case.assembled(), rows, causal_pattern(rows))
        assert gap(right, case.run(case.assembled(shift=5), rows, causal_pattern(rows))) > BROKEN
        wrong = case.run(case.assembled(), rows, bottom_right_plan(rows, case.layout.num_tokens))
        assert gap(right, wrong) > BROKEN
        assert gap(right, reference_logits(case.folder, case.layout.ids)) > BROKEN


@pytest.mark.parametrize("primary", ["llama"], indirect=True)
def test_ratio_zero_equals_direct_reuse(case: Case) -> None:
    segments = [span.segment for span in case.layout.spans]
    zero, direct = prefilled(case.engine, segments, "cacheclip", 0.0), prefilled(case.engine, segments, "direct")
    assert gap(zero.logits, direct.logits) <= 1e-6
    assert zero.stats.recomputed_tokens == direct.stats.recomputed_tokens == 0


class TestFirstChunk:
    @pytest.mark.some(2)
    @pytest.mark.parametrize(
        ("primary", "ratio"),
        [*((name, 0.2) for name in TINY_MODELS), ("llama", 0.0), ("llama", 1.0)],
        indirect=["primary"],
    )
    def test_right_behind_the_prefix_it_is_exact_and_costs_nothing(
        self, primary: str, tiny_models: dict[str, str], chunks: list[str], ratio: float
    ) -> None:
        engine = make_engine(primary, tiny_models["auxiliary"])
        engine.precompute(chunks[:1])
        prompt = f"{chunks[0]}\n\nQuestion: how tall?"
        fused, plain = prefilled(engine, prompt, "cacheclip", ratio), prefilled(engine, prompt, "full")
        assert fused.stats.recomputed_tokens == 0 and fused.stats.chunk_tokens > 0
        assert gap(fused.logits, plain.logits) < EXACT
        assert gap(fused.logits, reference_logits(primary, fused.layout.ids)) < EXACT
        behind_words = f"Words before it. {prompt}"
        direct = prefilled(engine, behind_words, "direct")
        assert direct.stats.hits == 1 and gap(direct.logits, reference_logits(primary, direct.layout.ids)) > BROKEN
        assert prefilled(engine, behind_words, "cacheclip", 0.3).stats.recomputed_tokens > 0


KV = ("keys", "values")


class TestNoFuture:
    """Changing a later token never changes the recomputed KV of an earlier one."""

    def difference(self, case: Case, plan: AttentionPattern, rows: torch.Tensor, border: int) -> float:
        """Of keys and values before ``border`` if stored KV and ids from there on are something else."""
        generator = torch.Generator().manual_seed(3)
        kv = {
            start: piece if start < border else piece + torch.randn(piece.shape, generator=generator)
            for start, piece in case.kv.items()
        }
        ids = case.layout.ids.clone()
        ids[border:] = torch.randint(3, case.runtime.vocab_size, ids[border:].shape, generator=generator)
        before, after = case.assembled(), case.assembled(kv=kv)
        case.run(before, rows, plan)
        case.run(after, rows, plan, ids)
        pairs = [*zip(before.layers, after.layers, strict=True)]
        return max(gap(getattr(a, of)[:, :, :border], getattr(b, of)[:, :, :border]) for a, b in pairs for of in KV)

    def test_earlier_rows_do_not_move_but_by_a_plan_that_leaks(self, case: Case) -> None:
        rows, border = case.rows(0.3), case.layout.chunks[2].start
        assert self.difference(case, causal_pattern(rows), rows, border) <= 1e-6
        assert self.difference(case, bottom_right_plan(rows, case.layout.num_tokens), rows, border) > BROKEN


class TestRotation:
    def test_moved_key_equals_key_computed_there(self, case: Case) -> None:
        """In layer 0 a key depends on its token and its position only."""
        span, runtime = case.layout.chunks[1], case.runtime
        stored = case.kv[span.start]
        for position in (0, 7, 301):
            filler = torch.full((position,), 5, dtype=torch.int64)
            ids = torch.cat((filler, torch.tensor(span.tokens.ids)))
            computed = run_reference(case.folder, ids)
            expected = computed.layers[0].keys[0, :, position:]
            tables = runtime.rotary.tables(torch.arange(position, position + len(span.tokens)))[0]
            assert gap(rotate(stored[0, 0], tables), expected) < 1e-5
            wrong = runtime.rotary.tables(torch.arange(position + 5, position + 5 + len(span.tokens)))[0]
            assert gap(rotate(stored[0, 0], wrong), expected) > BROKEN

    def test_extract_is_the_inverse_of_fill(self, case: Case) -> None:
        kv = case.kv[case.layout.chunks[0].start]
        for position in (0, 13, 777):
            cache = case.runtime.new_cache(position + kv.shape[3])
            cache.fill(kv, slot=position, position=position)
            assert gap(case.runtime.extract(cache, position, position + kv.shape[3]), kv) < 1e-5, position

    def test_encoding_behind_the_prefix_equals_plain_transformers(self, case: Case) -> None:
        """A chunk cache holds what the model computes when it reads prefix and chunk, and nothing else."""
        caches = case.engine.parts.models.caches_after_prefix
        span = case.layout.chunks[1]
        ids = torch.tensor([*caches.prefix_ids, *span.tokens.ids])
        computed = run_reference(case.folder, ids)
        start = len(caches.prefix_ids)
        tables = case.runtime.rotary.tables(torch.arange(start, len(ids)))
        for stored, layer, of_layer in zip(case.kv[span.start], computed.layers, tables, strict=True):
            assert gap(rotate(stored[0], of_layer), layer.keys[0, :, start:]) < EXACT
            assert gap(stored[1], layer.values[0, :, start:]) < EXACT


class TestBlockAttention:
    @staticmethod
    def dense(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Softmax over all slots in float64, hidden ones at minus infinity; KV heads repeated for their group."""
        groups = query.shape[1] // key.shape[1]
        q, k, v = (t[0].double() for t in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        logits = q @ k.transpose(-1, -2) * rule.scaling
        if rule.softcap:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        distance = visible[:, None] - torch.arange(k.shape[1])[None]
        hidden = (distance < 0) | (distance >= (rule.window or 10**9))
        span = rule.span or 10**9
        hidden |= torch.arange(k.shape[1])[None] // span < visible[:, None] // span
        weights = logits.masked_fill(hidden, float("-inf")).exp()
        sinks = torch.zeros(q.shape[0]) if rule.sinks is None else rule.sinks.double().exp()
        return (weights / (weights.sum(-1, keepdim=True) + sinks[:, None, None]) @ v).transpose(0, 1)[None]

    @examples(100)
    @given(data=st.data())
    def test_equals_dense_reference(self, data: st.DataObject) -> None:
        num_slots = data.draw(st.integers(1, 400), "slots")
        num_rows = data.draw(st.integers(1, num_slots), "rows")
        kv_heads, groups = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (4, 1)]), "heads")
        head_dim = data.draw(st.sampled_from([2, 8, 16]), "head_dim")
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20), "seed"))
        query = torch.randn(1, kv_heads * groups, num_rows, head_dim, generator=generator) * 2
        key, value = torch.randn(2, 1, kv_heads, num_slots, head_dim, generator=generator)
        value = value[..., : data.draw(st.sampled_from([head_dim, head_dim // 2]), "width of values")]
        rows = torch.randperm(num_slots, generator=generator)[:num_rows].sort().values
        rule = AttentionRule(
            scaling=head_dim**-0.5,
            window=data.draw(st.none() | st.integers(1, 450), "window"),
            span=data.draw(st.none() | st.integers(1, 450), "span"),
            softcap=data.draw(st.sampled_from([None, 3.0]), "softcap"),
            sinks=torch.randn(kv_heads * groups, generator=generator) if data.draw(st.booleans(), "sinks") else None,
        )
        unmasked = data.draw(st.sampled_from([1, 40, 1000]), "keys that are multiplied apart")
        with patch.object(attention, "_UNMASKED", unmasked), torch.inference_mode():
            got = block_attention(query, key, value, causal_pattern(rows).blocks, rule)
        assert gap(got.double(), self.dense(query, key, value, rows, rule)) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_keys_without_a_mask_are_multiplied_apart(self, dtype: torch.dtype) -> None:
        """A block whose rows all see 1,024 keys takes two products. In bfloat16 it is as exact as one."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(3000, generator=generator)[:300].sort().values
        query = torch.randn(1, 6, 300, 64, generator=generator).to(dtype)
        key, value = torch.randn(2, 1, 2, 3000, 64, generator=generator).to(dtype)
        rule = AttentionRule(scaling=0.125)
        expected = self.dense(query, key, value, rows, rule)
        gaps = []
        for unmasked in (1024, 4000):
            parts = patch.object(attention, "_in_two_parts", wraps=attention._in_two_parts)
            with patch.object(attention, "_UNMASKED", unmasked), torch.inference_mode(), parts as split:
                got = block_attention(query, key, value, causal_pattern(rows).blocks, rule)
            assert split.call_count == (3 if unmasked == 1024 else 0)
            gaps.append((got.double() - expected).abs().max().item())
        assert gaps[0] < (1e-5 if dtype == torch.float32 else 1e-2), gaps
        assert gaps[0] < 1.5 * gaps[1], gaps

    @pytest.mark.parametrize("mistake", [0.0, 0.5])
    def test_kernels_whose_parts_do_not_merge_are_not_used(self, mistake: float, monkeypatch: Any) -> None:
        """A log-sum-exp in other units, of one of the two kernels."""
        right = attention._with_mass

        def wrong(rows: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
            found, mass = right(rows, keys, values, mask, scale)
            return found, mass + mistake * (mask is not None)

        monkeypatch.setattr(attention, "_with_mass", wrong)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with torch.inference_mode():
                merge = attention.parts_merge.__wrapped__(torch.device("cpu"), dtype, 64)
            assert merge == (not mistake)

    def test_long_prompts_have_blocks_of_twice_as_many_rows(self) -> None:
        generator = torch.Generator().manual_seed(0)
        slots = attention_pattern._LONG + 50
        rows = torch.randperm(slots, generator=generator)[:300].sort().values
        rows[-1] = slots - 1
        query = torch.randn(1, 2, 300, 8, generator=generator)
        key, value = torch.randn(2, 1, 1, slots, 8, generator=generator)
        for window in (None, 1, 700, slots):
            rule = AttentionRule(scaling=0.3, window=window)
            blocks = causal_pattern(rows).blocks
            assert [len(block.positions) for block in blocks] == [128, 128, 44]
            with torch.inference_mode():
                got = block_attention(query, key, value, blocks, rule)
            assert gap(got.double(), self.dense(query, key, value, rows, rule)) < 1e-5

    def test_masks_beyond_the_memory_for_them_are_made_anew(self) -> None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(400, generator=generator)[:200].sort().values
        query = torch.randn(1, 2, 200, 8, generator=generator)
        key, value = torch.randn(2, 1, 1, 400, 8, generator=generator)
        rule, found = AttentionRule(scaling=0.3), []
        for most in (attention_pattern._MASK_BYTES, 100_000, 0):
            with patch.object(attention_pattern, "_MASK_BYTES", most):
                blocks = causal_pattern(rows).blocks
                found.append([block_attention(query, key, value, blocks, rule) for _ in range(2)])
            masks = blocks[0].masks
            assert masks.num_bytes == sum(mask.nbytes for mask in masks.by_use.values()) <= most
            assert bool(masks.by_use) == (most > 0)
        assert all(torch.equal(each, found[0][0]) for pair in found for each in pair)

    def test_gradients_flow_through_one_product(self) -> None:
        """The kernel that returns the log-sum-exp has no gradient for it."""
        query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
        rule = AttentionRule(scaling=0.5)
        with patch.object(attention, "_UNMASKED", 1):
            found = block_attention(query[:, :, 4:], key, value, causal_pattern(torch.arange(4, 8)).blocks, rule)
        found.square().sum().backward()
        ours = key.grad
        key.grad = None
        weights = (query[:, :, 4:] @ key.transpose(-1, -2) * 0.5 + torch.full((4, 8), -torch.inf).triu(5)).softmax(-1)
        (weights @ value).square().sum().backward()
        assert ours is not None and key.grad is not None and gap(ours, key.grad) < 1e-5

    @examples(30)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=4),
        window=st.sampled_from([None, 1, 5]),
        span=st.sampled_from([None, 4]),
    )
    def test_side_by_side_blocks_do_not_meet(
        self, lengths: list[tuple[int, int]], window: int | None, span: int | None
    ) -> None:
        """Stretches laid side by side give what each gives alone."""
        generator = torch.Generator().manual_seed(len(lengths))
        num_rows, num_slots = sum(r for _, r in lengths), sum(c + r for c, r in lengths)
        query = torch.randn(1, 4, num_rows, 8, generator=generator)
        key, value = torch.randn(2, 1, 2, num_slots, 8, generator=generator)
        blocks, alone, row, slot = [], [], 0, 0
        rule = AttentionRule(0.35, window=window, span=span)
        for context, rows in lengths:
            visible = torch.arange(context, context + rows)
            blocks.append(Block.of(slice(row, row + rows), slice(slot, slot + context + rows), visible))
            part = slice(slot, slot + context + rows)
            alone.append(self.dense(query[:, :, row : row + rows], key[:, :, part], value[:, :, part], visible, rule))
            row, slot = row + rows, slot + context + rows
        got = block_attention(query, key, value, blocks, rule)
        assert gap(got.double(), torch.cat(alone, 1)) < 1e-5

    @pytest.mark.parametrize("softcap", [None, 3.0])
    def test_chunks_begin_behind_the_padding_of_a_sequence(self, softcap: float | None) -> None:
        query, (key, value) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 2, 18, 8)
        rule, padding = AttentionRule(0.35, span=4, softcap=softcap), [0, 3]
        block = SideBySide(slice(0, 6), slice(0, 18), torch.tensor(padding))
        expected = []
        for number, count in enumerate(padding):
            own, rows = slice(9 * number + count, 9 * number + 9), slice(3 * number, 3 * number + 3)
            visible = torch.arange(6, 9) - count
            expected.append(self.dense(query[:, :, rows], key[:, :, own], value[:, :, own], visible, rule))
        assert gap(block_attention(query, key, value, [block], rule).double(), torch.cat(expected, 1)) < 1e-5


@pytest.mark.parametrize("primary", KINDS, indirect=True)
class TestPrompts:
    def test_same_chunk_twice(self, primary: str, tiny_models: dict[str, str], chunks: list[str]) -> None:
        case = make_case(primary, tiny_models["auxiliary"], [chunks[0], chunks[1], chunks[0]])
        segments = [span.segment for span in case.layout.spans]
        assert (
            gap(prefilled(case.engine, segments, "cacheclip", 1.0).logits, reference_logits(primary, case.layout.ids))
            < EXACT
        )
