"""Conformance suite for runtimes: what planner, store, decoding and observers rely on.

    class TestMine(RuntimeConformance):
        def make_runtime(self, folder):
            return MyRuntime(...)
        def reference_logits(self, runtime, ids, num_decoded):
            return logits_of_the_same_weights_elsewhere(ids)

``reference_logits`` bypasses the code under test: without it, a runtime that makes the same error everywhere would
pass. Logits are compared with :attr:`tolerance`, because two correct computations differ by rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from cacheclip_rag.models import register_runtime, unload_models
from cacheclip_rag.runtime import PhaseClock, Runtime

_CHUNKS = (
    "The lighthouse of Brindle Point was built in 1847 by the engineer Ada Thornbury.",
    "Its lamp burned whale oil until 1871, when it was changed to paraffin.",
)
_PROMPT = "\n\n".join(_CHUNKS) + "\n\nQuestion: when was the lamp changed?"
_SHORT = SamplingParams(max_tokens=8)


class RuntimeCase:
    """A runtime, an engine with it, and what its logits must be."""

    tolerance: float = 1e-4
    """Largest difference of logits between two correct ways of computing them."""

    def make_runtime(self, folder: Path) -> Runtime:
        """A runtime that can reuse KV; ``folder`` is an empty folder of this test."""
        raise NotImplementedError

    def reference_logits(self, runtime: Runtime, ids: torch.Tensor, num_decoded: int) -> torch.Tensor:
        """Logits of the last of ``ids`` ``(num_tokens,)``, computed without the code under test: ``(vocab_size,)``.

        ``num_decoded``: the last tokens that were decoded one by one. To a model that makes no difference.
        """
        raise NotImplementedError

    @pytest.fixture
    def runtime(self, tmp_path: Path) -> Runtime:
        return self.make_runtime(tmp_path)

    @pytest.fixture
    def engine(self, runtime: Runtime) -> CacheClipEngine:
        """An engine with this runtime and no auxiliary model."""
        unload_models()
        register_runtime("conformance", lambda name, *, dtype, device: runtime)
        config = EngineConfig(primary="conformance:model", auxiliary=None, method="epic", chunk_context="prefix")
        return CacheClipEngine(config)


class EncodingConformance(RuntimeCase):
    """From text to tokens to KV."""

    def test_tokens_are_the_same_at_every_call(self, runtime: Runtime) -> None:
        first, again = runtime.tokenize(_PROMPT), runtime.tokenize(_PROMPT)
        assert len(first) > 8 and first == again

    def test_offsets_cover_the_text_in_order(self, runtime: Runtime) -> None:
        offsets = [pair for pair in runtime.tokenize(_PROMPT).offsets if pair[1] > pair[0]]
        assert offsets and offsets == sorted(offsets)
        assert offsets[0][0] == 0 and offsets[-1][1] == len(_PROMPT)

    def test_no_text_of_a_user_is_an_end(self, runtime: Runtime) -> None:
        for text in ("<|im_end|>", "</s>", "<|endoftext|>", "<|eot_id|>"):
            assert not runtime.eos_ids & set(runtime.tokenize(text).ids), text

    def test_kv_has_the_shape_that_it_declares(self, runtime: Runtime) -> None:
        ids = runtime.tokenize(_CHUNKS[0]).ids
        for kv in (runtime.encode(ids), runtime.encode(ids, runtime.encode(ids[:3]))):
            assert kv.shape == runtime.kv_shape(len(ids))
            assert kv.dtype == (runtime.dtype if runtime.kv_codec is None else torch.uint8)
            assert bool(kv.isfinite().all())

    def test_kv_depends_on_its_tokens(self, runtime: Runtime) -> None:
        one, other = (runtime.encode(runtime.tokenize(text).ids[:6]) for text in _CHUNKS)
        assert not torch.equal(one, other)

    def test_it_has_a_fingerprint_and_room(self, runtime: Runtime) -> None:
        assert runtime.fingerprint and 0 < runtime.reuse_tokens <= runtime.context_tokens


class LogitsConformance(RuntimeCase):
    """Prefill, decoding and reading in blocks."""

    def test_prefill_equals_the_reference(self, runtime: Runtime) -> None:
        ids = torch.tensor(runtime.tokenize(_PROMPT).ids)
        state, logits = runtime.prefill(ids, len(ids) + 1)
        assert state.get_seq_length() == len(ids)
        assert float((logits - self.reference_logits(runtime, ids, 0)).abs().max()) <= self.tolerance

    def test_decoding_equals_the_reference(self, runtime: Runtime) -> None:
        """Compares each step, also beyond the requested capacity."""
        ids = torch.tensor(runtime.tokenize(_PROMPT).ids)
        state, logits = runtime.prefill(ids, len(ids) + 1)
        for number in range(1, 5):
            ids = torch.cat((ids, logits.argmax()[None]))
            logits = runtime.decode_step(state, int(ids[-1]))
            assert state.get_seq_length() == len(ids)
            assert float((logits - self.reference_logits(runtime, ids, number)).abs().max()) <= self.tolerance

    def test_several_answers_at_once_equal_each_alone(self, runtime: Runtime) -> None:
        ids = torch.tensor(runtime.tokenize(_PROMPT).ids)
        together, alone = ([runtime.prefill(ids[n:], len(ids))[0] for n in range(3)] for _ in range(2))
        for step in range(3):
            tokens = ids[step : step + 3].tolist()
            of_all = runtime.decode_steps(together, tokens)
            for state, token, logits in zip(alone, tokens, of_all, strict=True):
                assert float((runtime.decode_step(state, token) - logits).abs().max()) <= self.tolerance
        assert [state.get_seq_length() for state in together] == [len(ids) + 3 - n for n in range(3)]

    def test_the_reference_tells_prompts_apart(self, runtime: Runtime) -> None:
        """Twin of the two tests above: other tokens must give other logits."""
        ids = torch.tensor(runtime.tokenize(_PROMPT).ids)
        expected = self.reference_logits(runtime, ids, 0)
        others = [runtime.prefill(torch.cat((ids[n : n + 1], ids[1:])), len(ids))[1] for n in range(1, 6)]
        assert max(float((logits - expected).abs().max()) for logits in others) > self.tolerance

    def test_reading_in_blocks_equals_the_reference(self, runtime: Runtime, engine: CacheClipEngine) -> None:
        """A prompt read block by block, then two tokens at once, one of them read again. Only with ``can_extend``."""
        if not runtime.can_extend:
            engine.precompute(_CHUNKS)
            stats = engine.generate(_PROMPT, _SHORT, finish="revise").stats
            assert stats.hits == len(_CHUNKS) and stats.verified_tokens is None
            return
        ids = torch.tensor(runtime.tokenize(_PROMPT).ids)
        with engine.prefixes.match([]) as nothing:
            state = runtime.begin(nothing, len(ids))
        assert state.get_seq_length() == 0
        assert runtime.extend(state, ids[:7], 0, head=False) is None and state.get_seq_length() == 7
        logits = runtime.extend(state, ids[7:], 7)
        assert logits is not None and logits.dim() == 1
        assert float((logits - self.reference_logits(runtime, ids, 0)).abs().max()) <= self.tolerance
        more = torch.cat((ids, ids[:2]))
        logits = runtime.extend(state, more[len(ids) :], len(ids), logits_to_keep=2)
        assert logits is not None and logits.dim() == 2
        for number, row in enumerate(logits, 1):
            expected = self.reference_logits(runtime, more[: len(ids) + number], number)
            assert float((row - expected).abs().max()) <= self.tolerance
        runtime.cut(state, len(ids))
        assert state.get_seq_length() == len(ids)
        other = torch.cat((ids, ids[1:2]))
        logits = runtime.decode_step(state, int(other[-1]))
        assert float((logits - self.reference_logits(runtime, other, 1)).abs().max()) <= self.tolerance


class RuntimeConformance(EncodingConformance, LogitsConformance):
    """Inherit it in a class whose name begins with ``Test``, and implement the two methods of :class:`RuntimeCase`."""

    def test_a_revised_answer_equals_plain_prefill(self, engine: CacheClipEngine) -> None:
        engine.precompute(_CHUNKS)
        full = engine.generate(_PROMPT, _SHORT, method="full")
        engine.prefixes.clear()
        revised = engine.generate(_PROMPT, _SHORT, finish="revise")
        assert revised.stats.hits == len(_CHUNKS)
        assert revised.token_ids == full.token_ids or not engine.primary.can_extend

    def test_a_chunk_right_after_its_prefix_equals_plain_prefill(self, engine: CacheClipEngine) -> None:
        engine.precompute(_CHUNKS[:1])
        prompt = f"{_CHUNKS[0]}\n\nWhen?"
        full = engine.prefill(prompt, method=engine.make_method("full"))
        direct = engine.prefill(prompt, method=engine.make_method("direct"))
        assert direct.stats.hits == 1 and direct.stats.fallback is None
        assert float((full.logits - direct.logits).abs().max()) <= self.tolerance

    def test_ratio_one_equals_plain_prefill(self, engine: CacheClipEngine) -> None:
        engine.precompute(_CHUNKS)
        full = engine.generate(_PROMPT, _SHORT, method="full")
        engine.prefixes.clear()
        reused = engine.generate(_PROMPT, _SHORT, recompute_ratio=1.0)
        assert reused.stats.hits == len(_CHUNKS) and reused.token_ids == full.token_ids

    def test_the_budget_is_kept(self, engine: CacheClipEngine) -> None:
        engine.precompute(_CHUNKS)
        stats = engine.generate(_PROMPT, _SHORT, recompute_ratio=0.25).stats
        assert stats.recomputed_tokens == round(0.25 * stats.chunk_tokens)

    def test_what_cannot_be_read_is_computed(self, engine: CacheClipEngine) -> None:
        """A plan whose chunks were deleted before it is carried out gives the answer of plain prefill."""
        engine.precompute(_CHUNKS)
        full = engine.generate(_PROMPT, _SHORT, method="full")
        engine.prefixes.clear()
        method = engine.make_method()
        kv_sources = engine.parts.kv_sources(method)
        plan = engine.plan(_PROMPT)
        assert len(plan.reused) == len(_CHUNKS)
        engine.release(_CHUNKS)
        fused = kv_sources.primary.runtime.fuse(plan, kv_sources, capacity=512, clock=PhaseClock())
        assert fused is None
        again = engine.generate(_PROMPT, _SHORT, documents=_CHUNKS)
        assert again.token_ids == full.token_ids and again.stats.misses == len(_CHUNKS)

    def test_phases_are_within_the_time_to_the_first_token(self, engine: CacheClipEngine) -> None:
        engine.precompute(_CHUNKS)
        stats = engine.generate(_PROMPT, _SHORT).stats
        assert 0 < sum(stats.phases_s.values()) <= stats.ttft_s
