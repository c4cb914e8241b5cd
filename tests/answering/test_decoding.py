"""Choosing tokens and turning them into text."""

import tracemalloc
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheclip_rag import ConfigurationError, SamplingParams
from cacheclip_rag.answering.decoding import Sampler, _logprobs, room_for
from cacheclip_rag.answering.text import TextStream
from cacheclip_rag.base.sampling import GREEDY_BELOW, LEAST_PENALTY, is_greedy
from cacheclip_rag.measuring import ModelRuntime
from cacheclip_rag.models.load import load_model
from cacheclip_rag.runtime.transformers.user_text import TokenBytes
from tests.conftest import Models, Patch, examples, spied

CPU = torch.device("cpu")
TOWER = "Paris 🗼 東京 👩‍👩‍👧 é"


@pytest.fixture
def runtime(tiny_models: Models) -> ModelRuntime:
    return load_model(tiny_models["llama"])


def streamed(runtime: ModelRuntime, ids: list[int], stop: list[str] | None = None) -> tuple[list[str], TextStream]:
    """Pieces of a stream that is fed until it stops, as the engine feeds it."""
    stream = TextStream(runtime.decode_ids, stop or [])
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    pieces.append(stream.flush())
    return pieces, stream


NAN = float("nan")
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, "3", 2.5, True],
    "temperature": [-0.1, 100.1, NAN, float("inf"), "hot", None],
    "top_p": [-0.1, 1.1, NAN, None],
    "top_k": [-2, 1.5],
    "repetition_penalty": [0.0, 5e-324, 10**400, NAN],
    "frequency_penalty": [2.1, -2.1, "1", True, NAN],
    "presence_penalty": [2.1, -2.1, "1", True, 10**400],
    "stop": ["a string", ["a list"], ("ok", ""), ("ok", 3)],
}


NUMBERS = [name for name in WRONG if name != "stop"]
EDGES = (0, 1, -1, 2**31, 2**70, 10**400, 5e-324, 1e-300, 1e-40, 1e-5, 1 - 1e-16, 9.9, 100.0, 1e38, 1e308, float("inf"))


class TestSamplingParams:
    @pytest.mark.some(3)
    @pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in WRONG.items() for value in values])
    def test_out_of_range_or_of_a_wrong_type(self, option: str, value: Any) -> None:
        with pytest.raises(ConfigurationError, match=option):
            SamplingParams(**{option: value})

    def test_edges_are_allowed(self) -> None:
        SamplingParams(max_tokens=1, temperature=0, top_p=5e-324, stop=())
        SamplingParams(temperature=100.0, top_p=1.0, seed=0)
        SamplingParams(temperature=5e-324, repetition_penalty=LEAST_PENALTY, top_k=2**70, seed=-(2**63))
        SamplingParams(repetition_penalty=10)
        SamplingParams(top_p=0, frequency_penalty=-2, presence_penalty=2)

    @examples(300)
    @given(st.fixed_dictionaries({}, optional=dict.fromkeys(NUMBERS, st.sampled_from(EDGES) | st.floats())))
    @example({"repetition_penalty": 1e-300, "temperature": 1})
    @example({"repetition_penalty": LEAST_PENALTY, "temperature": GREEDY_BELOW})
    def test_what_is_accepted_computes(self, options: dict[str, Any]) -> None:
        """Every number and every pair of them, also with large logits and tokens that must not come."""
        given = {}
        for name, value in options.items():
            with suppress(ConfigurationError):
                SamplingParams(**{name: value})
                given[name] = value
        params = SamplingParams(**given, seed=7)
        for logits in (torch.tensor([3e4, -3e4, 2.0, 0.0]), torch.tensor([-3e4, float("-inf"), -2e4, float("-inf")])):
            sampler = Sampler(params, CPU, prompt_ids=torch.tensor([0, 1, 2]))
            assert {sampler.pick(logits) for _ in range(3)} <= set(range(4))
        assert room_for(params) >= 1


class TestTextStream:
    def test_unfinished_characters_are_held_back_and_special_tokens_silent(self, runtime: ModelRuntime) -> None:
        ids = list(runtime.tokenize("a🗼b").ids)
        assert len(ids) == 6  # the emoji takes four byte tokens
        stream = TextStream(runtime.decode_ids, [])
        assert [stream.push(token) for token in ids] == ["a", "", "", "", "🗼", "b"]
        ids[1:-1] = runtime.tokenize("<|im_start|>", control=True).ids
        assert "".join(streamed(runtime, ids)[0]) == "ab"

    @examples(100)
    @given(
        ids=st.lists(st.integers(0, 399), max_size=30),
        stop=st.lists(st.text("ab e\n", min_size=1, max_size=3), max_size=2),
    )
    def test_pieces_join_to_the_text_for_any_tokens(self, tiny_models: Models, ids: list[int], stop: list[str]) -> None:
        """Any ids at all, broken bytes among them: joined pieces are the text, and the text is cut at the stop."""
        runtime = load_model(tiny_models["llama"])
        pieces, stream = streamed(runtime, ids, stop)
        assert "".join(pieces) == stream.text
        whole = runtime.decode_ids(ids)
        ends = [at for s in stop if (at := whole.find(s)) >= 0]
        assert stream.text == (whole[: min(ends)] if ends else whole)
        assert (stream.stopped_by is not None) == bool(ends)


def sentencepiece() -> Tokenizer:
    """Pieces with a mark for spaces, bytes for what has no piece, and no space before a text's first word."""
    others = ("\u2581", "\u2581a", "a", "b", "\u2581b", "\u2581\u2581", "東")
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *others]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True))
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_level() -> Tokenizer:
    """Every token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


class TestLongTexts:
    @examples(300)
    @given(ids=st.lists(st.integers(0, 255), max_size=40))
    def test_pieces_join_to_the_text_of_any_bytes(self, ids: list[int]) -> None:
        tokenizer = byte_level()
        assert self.joined(tokenizer, ids) == tokenizer.decode(ids)

    @examples(300)
    @given(parts=st.lists(st.integers(0, 264) | st.characters(exclude_categories=["Cs"]), max_size=20))
    def test_pieces_join_to_the_text_of_pieces_and_characters(self, parts: list[int | str]) -> None:
        """A first token is written without its space, and bytes are written as a character once it is whole."""
        tokenizer = sentencepiece()
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += [2 + byte for byte in part.encode()]
            elif not 2 <= part < 258:  # a single byte would change how its neighbours are written
                ids.append(part)
        assert self.joined(tokenizer, ids) == tokenizer.decode(ids)

    @staticmethod
    def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
        stream = TextStream(tokenizer.decode, [])
        pieces = "".join(stream.push(token) for token in ids)
        assert stream.text.startswith(pieces)
        pieces += stream.flush()
        assert pieces == stream.text
        return pieces

    def test_a_token_costs_the_same_however_long_the_text_is(self, runtime: ModelRuntime, monkeypatch: Patch) -> None:
        calls, text = spied(monkeypatch, runtime, "decode_ids"), " ".join([TOWER] * 40)
        stream = TextStream(runtime.decode_ids, ["never"])
        for token in runtime.tokenize(text).ids:
            stream.push(token)
        assert stream.text + stream.flush() == text
        assert max(len(ids) for (ids,) in calls) <= 8 and len(calls) > 1000

    def test_a_token_copies_no_text_that_is_final(self) -> None:
        stream = TextStream(lambda ids: "word " * len(ids), ["never"])
        for _ in range(20_000):
            stream.push(0)
        tracemalloc.start()
        try:
            for _ in range(10):
                stream.push(0)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 10_000 < len(stream.text) == 5 * 20_010

    @examples(300)
    @given(
        ids=st.lists(st.sampled_from(b"ab\xc3\xa9\xf0\x9f\x97\xbc"), max_size=40),
        stop=st.lists(st.text("abé🗼\ufffd", min_size=1, max_size=4), max_size=3),
    )
    def test_text_is_cut_at_the_first_stop_string(self, ids: list[int], stop: list[str]) -> None:
        """As by a stream that looks at all text after each token."""
        stream, sent = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stop), ""
        for number, token in enumerate(ids, 1):
            sent += stream.push(token)
            text = bytes(ids[:number]).decode(errors="replace")
            ends = [at for s in stop if (at := text.find(s)) >= 0]
            assert stream.text == text[: min(ends, default=None)] and (stream.stopped_by is not None) == bool(ends)
            assert stream.text.startswith(sent)
            if ends:
                break
        assert sent + stream.flush() == stream.text


class TestLogprobs:
    @examples(100)
    @given(ids=st.lists(st.integers(0, 255), max_size=20))
    def test_of_bytes(self, ids: list[int]) -> None:
        fast = PreTrainedTokenizerFast(tokenizer_object=byte_level())
        assert b"".join(map(TokenBytes.of(fast), ids)).decode(errors="replace") == byte_level().decode(ids)

    def test_of_pieces(self) -> None:
        fast = PreTrainedTokenizerFast(tokenizer_object=sentencepiece())
        known = {"<s>": b"<s>", "<0xE6>": b"\xe6", "\u2581a": b" a", "a": b"a", "東": "東".encode()}
        bytes_of = TokenBytes.of(fast)
        assert {piece: bytes_of(fast.convert_tokens_to_ids(piece)) for piece in known} == known

    def test_costs_no_more_with_many_added_tokens(self, runtime: ModelRuntime, monkeypatch: Patch) -> None:
        """A tokenizer copies all of them at each look. Candidates do not decode the token before them again."""
        looks, decoded = [], []
        kind = type(runtime.tokenizer)
        monkeypatch.setattr(kind, "added_tokens_decoder", property(lambda tokenizer: looks.append(1) or {}))
        monkeypatch.setattr(
            kind, "backend_tokenizer", property(lambda tokenizer: looks.append(1) or tokenizer._tokenizer)
        )

        def text_of(ids: Sequence[int]) -> str:
            decoded.append(tuple(ids))
            return ""

        pairs = [(token, -1.0) for token in range(10)]
        recorded = SimpleNamespace(recorded=[[(1, -1.0), *pairs]] * 20)
        assert len(_logprobs(cast("Sampler", recorded), runtime, text_of)) == 20
        assert len(looks) <= 1 and len(decoded) == 20 * (1 + 10 + 1)


class TestSampler:
    LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))

    def picks(self, count: int, **options: Any) -> list[int]:
        sampler = Sampler(SamplingParams(**options), CPU)
        return [sampler.pick(self.LOGITS) for _ in range(count)]

    def test_greedy_and_seeds(self) -> None:
        assert self.picks(20) == self.picks(20, seed=3, top_p=0.9) == [0] * 20
        assert self.picks(50, temperature=1.0, seed=7) != self.picks(50, temperature=1.0, seed=8)
        assert self.picks(200, temperature=1.0) != self.picks(200, temperature=1.0)
        half = Sampler(SamplingParams(temperature=0.7, seed=1), CPU)
        assert half.pick(self.LOGITS.to(torch.bfloat16)) in range(4)

    @pytest.mark.parametrize(
        ("options", "kept"),
        [
            ({"top_p": 0.45}, 1),
            ({"top_p": 0.75}, 2),
            ({"top_p": 1.0}, 4),
            ({"top_p": 0, "temperature": 50.0}, 1),
            ({"top_k": 1}, 1),
            ({"top_k": 3}, 3),
            ({"top_k": -1}, 4),
            ({"temperature": 0.05}, 1),
        ],
    )
    def test_the_smallest_set_is_kept(self, options: dict[str, float], kept: int) -> None:
        assert {*self.picks(500, **{"temperature": 1.0, "seed": 1, **options})} == {*range(kept)}

    def test_heat_flattens(self) -> None:
        hot = self.picks(800, temperature=50.0, seed=1)
        assert min(hot.count(token) for token in range(4)) > 120

    def test_other_samplers_and_torch_s_own_generator_do_not_interfere(self) -> None:
        expected = self.picks(20, temperature=1.0, seed=7)
        before = torch.get_rng_state()
        ours, other = (Sampler(SamplingParams(temperature=1.0, seed=s), CPU) for s in (7, 8))
        got = []
        for _ in range(20):
            other.pick(self.LOGITS)
            torch.rand(3)
            got.append(ours.pick(self.LOGITS))
        assert got == expected
        torch.set_rng_state(before)
        self.picks(5, temperature=1.0, seed=1)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        "penalties", [(0.7, 0.0), (0.0, 0.7), (0.3, 0.4), (-0.5, 0.0), (0.0, -0.5)], ids="{}".format
    )
    @pytest.mark.parametrize("repetition", [1.0, 1.3])
    def test_penalties_are_those_of_openai(self, penalties: tuple[float, float], repetition: float) -> None:
        """``logit - count * frequency - (count > 0) * presence``, with counts of the answer alone; before them, as in
        vLLM, the penalty for repetition, which counts the prompt."""
        frequency, presence = penalties
        options = {"frequency_penalty": frequency, "presence_penalty": presence, "repetition_penalty": repetition}
        sampler = Sampler(SamplingParams(**options), CPU, prompt_ids=torch.tensor([1, 1, 1, 2]))
        rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(5))
        answer: list[int] = []
        for row in rows:
            found = []
            for token, logit in enumerate(row.tolist()):
                if token in (1, 2, *answer):
                    logit = logit / repetition if logit > 0 else logit * repetition
                found.append(logit - answer.count(token) * frequency - (token in answer) * presence)
            answer.append(found.index(max(found)))
            assert sampler.pick(row) == answer[-1]
        assert answer != rows.argmax(-1).tolist()

    @pytest.mark.parametrize(
        "option",
        [{"frequency_penalty": -0.1}, {"presence_penalty": 1}, {"top_k": 3}, {}, {"temperature": 50.0, "top_p": 0}],
    )
    def test_what_is_greedy(self, option: dict[str, Any]) -> None:
        """What full prefill's likeliest tokens are compared with."""
        assert is_greedy(SamplingParams(**option)) == (not any("penalty" in name for name in option))

    def test_frequencies_follow_the_probabilities(self) -> None:
        picks = self.picks(3000, temperature=1.0, seed=1)
        for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
            assert abs(picks.count(token) / 3000 - share) < 0.03
