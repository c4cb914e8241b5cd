"""Chunks are written, corrected and scored together: the same as one by one, and no more operations for more chunks."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheclip_rag import CacheClipEngine, Chunk, SamplingParams
from cacheclip_rag.methods.recompute import install_correction
from cacheclip_rag.models.load import load_model
from cacheclip_rag.plugins import Span
from cacheclip_rag.runtime.base import TokenizedText
from cacheclip_rag.runtime.transformers import attention_pattern
from cacheclip_rag.runtime.transformers.rotary import rotate, unrotate
from cacheclip_rag.selection.auxiliary_pass import score_chunks
from cacheclip_rag.selection.heads import HeadSet
from cacheclip_rag.store import KV, StoredKV, decode_frame, encode_frame, join, part_of
from tests.conftest import SENTENCES, rag_prompt, some_of
from tests.fusion.cases import gap, make_engine
from tests.models.pretend import CUDA, Pretended, pretended

CODECS = ("float32", "bfloat16", "int8")
KEY = "0" * 64
CAPACITY = 400
ONE_OF_EACH = ("llama", "llama-rope-dynamic", "qwen2-sliding", "gemma3", "gpt-oss")


def stored(kv: torch.Tensor, codec: str) -> KV:
    return decode_frame(encode_frame(kv, codec, KEY, namespace="t"), KEY)


def random_kv(runtime: Any, num_tokens: int, seed: int) -> torch.Tensor:
    shape = (runtime.num_layers, 2, runtime.num_kv_heads, num_tokens, runtime.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces_of(runtime: Any, codec: str, seed: int) -> list[tuple[int, KV]]:
    """Parts of a few chunks, some of one chunk, at random slots in order."""
    choice, start, found = random.Random(seed), 0, list[tuple[int, KV]]()
    whole: KV = random_kv(runtime, 9, seed)
    for number in range(choice.randint(1, 7)):
        if number == 0 or choice.random() < 0.7:
            whole = stored(random_kv(runtime, choice.randint(1, 60), seed + number), codec)
        first = choice.randrange(whole.shape[3])
        stop = choice.randint(first + 1, whole.shape[3])
        start += choice.randint(0, 9)
        found.append((start, part_of(whole, first, stop)))
        start += stop - first
    return found


def cache_of(
    runtime: Any, pieces: Sequence[tuple[int, KV]], positions: torch.Tensor | None = None, *, together: bool
) -> Any:
    cache = runtime.new_cache(CAPACITY)
    cache.positions = positions
    if together:
        cache.fill_all(iter(pieces))
    for start, kv in () if together else pieces:
        cache.fill(kv, slot=start, position=start if positions is None else int(positions[start]))
    return cache


together, one_by_one = partial(cache_of, together=True), partial(cache_of, together=False)


def assert_same(found: Any, expected: Any, pieces: Sequence[tuple[int, KV]]) -> None:
    """Bit for bit, in the slots of the pieces."""
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.length == theirs.length
        for start, kv in pieces:
            own = slice(start, start + kv.shape[3])
            assert torch.equal(ours.keys[0, :, own], theirs.keys[0, :, own])
            assert torch.equal(ours.values[0, :, own], theirs.values[0, :, own])


class TestAssemble:
    @pytest.mark.some(3)
    @pytest.mark.parametrize("codec", CODECS)
    def test_as_one_by_one(self, primary: str, codec: str) -> None:
        runtime = load_model(primary)
        for seed in range(6):
            pieces = pieces_of(runtime, codec, seed)
            assert_same(together(runtime, pieces), one_by_one(runtime, pieces), pieces)

    @pytest.mark.parametrize("codec", CODECS)
    def test_on_a_gpu(self, tiny_models: dict[str, str], codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """There whole pieces are moved as they are stored, without waiting, and cut and put side by side after that."""
        runtime = load_model(tiny_models["llama"])
        for seed in range(20):
            for joined in join(pieces_of(runtime, codec, seed)):
                for number, heads in ((0, slice(None)), (runtime.num_layers - 1, slice(1, 2))):
                    expected = joined.layer(number, "cpu", heads)
                    with pretended(monkeypatch) as queue:
                        for piece in joined.pieces:
                            assert isinstance(piece, StoredKV)
                            queue.lock(torch.frombuffer(piece.frame.data, dtype=torch.uint8))
                        found = joined.layer(number, CUDA, heads)
                        assert queue.copies and (not queue.blocking.total() or heads != slice(None))
                    for here, there in zip(expected, found, strict=True):
                        assert here is there is None or (
                            isinstance(there, Pretended) and torch.equal(there.inner, here)
                        )

    def test_parts_of_one_text_are_moved_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kv = stored(torch.randn(1, 2, 2, 9, 16), "float32")
        [joined] = join((n, part_of(kv, n, n + 1)) for n in range(9))
        with pretended(monkeypatch) as queue:
            joined.layer(0, CUDA)
            assert queue.copies.total() == 1

    @pytest.mark.some(4)
    @pytest.mark.parametrize("codec", CODECS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_in_any_dtype(self, tiny_models: dict[str, str], codec: str, dtype: str) -> None:
        runtime = load_model(tiny_models["gemma3"], dtype=dtype)
        for seed in range(5):
            pieces = pieces_of(runtime, codec, seed)
            assert_same(together(runtime, pieces), one_by_one(runtime, pieces), pieces)

    @pytest.mark.parametrize("codec", CODECS)
    def test_a_layer_is_needed_when_it_is_written(self, tiny_models: dict[str, str], codec: str) -> None:
        """Layers whose bytes arrive one after the other, as from a slow store."""
        runtime = load_model(tiny_models["llama"])
        whole = [(start, stored(random_kv(runtime, 20, start), codec)) for start in (0, 30, 50)]
        arriving: list[tuple[int, Any]] = []
        for start, kv in whole:
            assert isinstance(kv, StoredKV)
            data = bytearray(kv.frame.data.nbytes)
            data[: kv.frame.start] = kv.frame.data[: kv.frame.start]
            arriving.append((start, StoredKV(replace(kv.frame, data=memoryview(data)))))
        cache = runtime.new_cache(CAPACITY)
        write = cache.filling(arriving)
        assert {layer.length for layer in cache.layers} == {70}
        for number in range(runtime.num_layers):
            for (_, kv), (_, target) in zip(whole, arriving, strict=True):
                frame = kv.frame  # type: ignore[union-attr]
                first, stop = (frame.start + n * frame.layer_size for n in (number, number + 1))
                target.frame.data[first:stop] = frame.data[first:stop]
            write(number)
        assert_same(cache, one_by_one(runtime, whole), whole)

    def test_computed_and_stored_with_several_codecs(self, tiny_models: dict[str, str]) -> None:
        runtime = load_model(tiny_models["llama"])
        pieces: list[tuple[int, KV]] = [(0, random_kv(runtime, 5, 0)), (5, random_kv(runtime, 4, 1))]
        for number, codec in enumerate(("int8", "float32", "float32", "int8", "bfloat16")):
            pieces.append((10 + 30 * number, stored(random_kv(runtime, 20, number), codec)))
        assert_same(together(runtime, pieces), one_by_one(runtime, pieces), pieces)

    def test_at_positions_of_their_own(self, tiny_models: dict[str, str]) -> None:
        runtime = load_model(tiny_models["qwen2"])
        positions = torch.arange(300) + torch.arange(300) // 40 * 11
        pieces = [(start, stored(random_kv(runtime, 30, start), "float32")) for start in (0, 40, 120, 200)]
        found = together(runtime, pieces, positions)
        assert_same(found, one_by_one(runtime, pieces, positions), pieces)
        plain = together(runtime, pieces)
        assert gap(plain.layers[0].keys[..., 120:150, :], found.layers[0].keys[..., 120:150, :]) > 1e-2

    def test_pieces_out_of_order_and_nothing(self, tiny_models: dict[str, str]) -> None:
        runtime = load_model(tiny_models["llama"])
        kv = random_kv(runtime, 5, 0)
        with pytest.raises(AssertionError, match="in order"):
            list(join([(10, kv), (3, kv)]))
        assert together(runtime, []).get_seq_length() == 0


class TestScores:
    LENGTHS = (3, 40, 41, 55, 60, 90, 200)
    """More than half wider than others, and not."""

    def kv(self, runtime: Any) -> tuple[torch.Tensor, list[torch.Tensor], tuple[int, ...]]:
        choice = random.Random(0)
        prefix = runtime.encode(runtime.tokenize("You answer questions.").ids)
        ids = [[choice.randrange(3, 290) for _ in range(length)] for length in self.LENGTHS]
        return prefix, [runtime.encode(each, prefix) for each in ids], runtime.tokenize(SENTENCES[5]).ids

    @pytest.mark.some(2)
    @pytest.mark.parametrize("options", [{}, {"layers": (0, 1)}], ids=str)
    def test_chunks_of_any_length_as_each_alone(self, primary: str, options: dict[str, Any]) -> None:
        runtime = load_model(primary)
        prefix, kv, question = self.kv(runtime)
        alone = [score_chunks(runtime, prefix, [each], question, **options)[0] for each in kv]
        for order in (range(len(kv)), (5, 0, 6, 2, 1, 4, 3)):
            found = score_chunks(runtime, prefix, [kv[n] for n in order], question, **options)
            for number, ours in zip(order, found, strict=True):
                assert gap(ours, alone[number]) < 1e-5 and len(ours) == self.LENGTHS[number]

    @pytest.mark.parametrize("primary", ONE_OF_EACH, indirect=True)
    def test_one_softmax_over_all_whatever_their_order(self, primary: str) -> None:
        runtime = load_model(primary)
        prefix, kv, question = self.kv(runtime)
        heads = HeadSet("0" * 64, ((0, 1), (1, 0), (1, 2)), torch.tensor([0.5, 0.25, 0.25]), sinks=3)
        sorted_ = score_chunks(runtime, prefix, kv, question, heads=heads)
        order = (5, 0, 6, 2, 1, 4, 3)
        found = score_chunks(runtime, prefix, [kv[n] for n in order], question, heads=heads)
        for number, ours in zip(order, found, strict=True):
            assert gap(ours, sorted_[number]) < 1e-5
        assert 0.5 < float(torch.cat(sorted_).sum()) < 1.001  # less where a window hides all chunks from a row
        assert all(bool((score[:3] == 0).all()) == (len(score) > 3) for score in sorted_)


def correct_one_by_one(
    runtime: Any, spans: Sequence[Span], weight: float, rows: torch.Tensor, kv: torch.Tensor, fresh: torch.Tensor
) -> torch.Tensor:
    """What the correction promises, chunk by chunk and in float64: KV ``(2, num_kv_heads, num_slots, head_dim)``."""
    found = kv.double()
    for span in spans:
        own = torch.arange(span.start, span.stop)
        is_chosen = torch.isin(own, rows)
        chosen, stale = own[is_chosen], own[~is_chosen]
        if not len(chosen) or not len(stale):
            continue
        tables = runtime.rotary.tables(torch.arange(span.stop))[0]
        of = [None if tables is None else tables.map(itemgetter(at)) for at in (chosen, stale)]
        change = fresh[:, :, torch.isin(rows, chosen)].float() - kv[:, :, chosen].float()
        offset = weight * unrotate(change[0], of[0]).mean(1, keepdim=True)
        found[0][:, stale] += rotate(offset.expand(-1, len(stale), -1), of[1])
        found[1][:, stale] += weight * change[1].mean(1, keepdim=True)
    return found


class TestCorrection:
    def test_as_one_by_one(self, primary: str) -> None:
        runtime = load_model(primary)
        heads, width = runtime.num_kv_heads, runtime.head_dim
        for seed in range(8):
            choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            spans, start = [], choice.randint(0, 5)
            for _ in range(choice.randint(1, 6)):
                length = choice.randint(1, 40)
                spans.append(Span(Chunk("text"), TokenizedText((0,) * length, ((0, 0),) * length), start))
                start += length + choice.randint(0, 4)
            num_slots = start + 7
            chance = choice.choice((0.02, 0.3, 0.9))
            rows = (torch.rand(num_slots, generator=generator) < chance).nonzero().flatten()
            rows = torch.cat((rows[rows < num_slots - 1], torch.tensor([num_slots - 1])))
            cache = runtime.new_cache(num_slots)
            kv = torch.randn(2, heads, num_slots, width, generator=generator)
            fresh = torch.randn(2, heads, len(rows), width, generator=generator)
            layer = cache.layers[0]
            layer.write(0, kv[0], kv[1])
            install_correction(runtime, cache, spans, 0.6)
            cache.scatter(rows)
            layer.update(fresh[0][None], fresh[1][None])
            expected = correct_one_by_one(runtime, spans, 0.6, rows, kv, fresh)
            stays = ~torch.isin(torch.arange(num_slots), rows)
            inside = torch.zeros(num_slots, dtype=torch.bool)
            for span in spans:
                inside[span.start : span.stop] = True
            assert gap(layer.keys[0][:, stays & inside].double(), expected[0][:, stays & inside]) < 1e-5
            assert gap(layer.values[0][:, stays & inside].double(), expected[1][:, stays & inside]) < 1e-5
            assert torch.equal(layer.keys[0][:, stays & ~inside], kv[0][:, stays & ~inside])
            assert torch.equal(layer.keys[0][:, rows], fresh[0])
            assert layer.before_scatter is None


class Counted(TorchDispatchMode):
    """Counts tensor operations, and those outside the models' layers."""

    def __init__(self, *models: Any) -> None:
        super().__init__()
        self.count = self.outside = 0
        self._inside = False
        self._hooks = [
            hook
            for model in models
            for layer in model.base_model.layers
            for hook in (
                layer.register_forward_pre_hook(lambda *_: self._enter(True)),  # after the package's own hook
                layer.register_forward_hook(lambda *_: self._enter(False), always_call=True),
            )
        ]

    def _enter(self, inside: bool) -> None:
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.outside += not self._inside
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()


class TestOperations:
    """The whole way to the first token: read, assemble, score, select and correct."""

    @staticmethod
    def operations(engine: CacheClipEngine, words: Sequence[str], num_chunks: int, *, mixed: bool) -> Counted:
        each = len(words) // num_chunks
        more = each // 3 if mixed else 0  # every second chunk is twice as long as the one before it
        cuts = [n * each - more * (n % 2) for n in range(num_chunks + 1)]
        chunks = [" ".join(words[start:stop]) for start, stop in pairwise(cuts)]
        engine.precompute(chunks)
        prompt = rag_prompt(chunks)
        engine.generate(prompt, SamplingParams(max_tokens=1))  # what is made once
        engine.prefixes.clear()
        method = engine.make_method()
        assert engine.auxiliary is not None
        with Counted(engine.primary.model, engine.auxiliary.model) as counted:
            found = engine.prefill(prompt, SamplingParams(max_tokens=1), method=method)
        assert found.stats.hits == num_chunks and found.stats.effective_ratio == pytest.approx(0.2, abs=0.01)
        return counted

    @some_of(4, codec=("float32", "int8"), mixed=(False, True), model=("llama", "gemma3", "gpt-oss"))
    def test_they_do_not_grow_with_the_number_of_chunks(
        self, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, codec: str, mixed: bool, model: str
    ) -> None:
        """Outside the layers they are equal. All rows are one block of attention: what stands between chunks is
        computed anew, so more chunks are more rows, and more blocks."""
        monkeypatch.setattr(attention_pattern, "ROWS_PER_BLOCK", 1024)
        choice = random.Random(0)
        words = [choice.choice(" ".join(SENTENCES).split()) for _ in range(640)]
        options = {"recompute_ratio": 0.2, "codec": codec}
        few, many = (
            self.operations(
                make_engine(tiny_models[model], tiny_models["auxiliary"], **options), words, count, mixed=mixed
            )
            for count in (8, 64)
        )
        assert many.outside <= 1.1 * few.outside, f"{few.outside} operations for 8 chunks, {many.outside} for 64"
        assert many.count <= 1.1 * few.count, f"{few.count} operations for 8 chunks, {many.count} for 64"
        if not mixed:
            assert (many.outside, many.count) == (few.outside, few.count)
