"""Text of users and documents: no control token comes out of it, and all other ids are transformers' own."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from cacheclip_testing.tiny import SENTENCES, TINY_MODELS, build_model, make_tokenizer
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheclip_rag.models.load import load_model, resolve
from cacheclip_rag.runtime.transformers.user_text import LeastTokens, text_tokenizer
from tests.conftest import examples

ALIKE = st.lists(
    st.sampled_from([*"abc <>|/_\n\u00e9\u0301\u200b\U0001f600", "think", "im_end", "eos", "h1"]), max_size=20
).map("".join)
"""Texts that look like control tokens, among others."""


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def now(own: Any, text: str, **options: bool) -> tuple[list[int], list[tuple[int, int]]]:
    encoded = own(text, add_special_tokens=False, return_offsets_mapping=True, **options)
    return encoded["input_ids"], encoded["offset_mapping"]


as_before = partial(now, split_special_tokens=True)
"""What transformers gives without special tokens."""


@cache
def byte_level(*tokens: str) -> Any:
    """The tests' tokenizer with more added tokens, not special ones."""
    tokenizer = make_tokenizer(400)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    return tokenizer


@cache
def sentencepiece(*in_vocabulary: str) -> Any:
    """BPE over characters as Gemma has it: added tokens in the middle of the vocabulary."""
    words = "\u2581".join(SENTENCES)
    letters = sorted({*words, *"<>/ab"})
    vocabulary = {text: n for n, text in enumerate(["<pad>", "<eos>", *in_vocabulary, *letters])}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    for a, b in merges:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<pad>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_tokens([AddedToken(token, normalized=False) for token in in_vocabulary])
    return fast


@cache
def unigram() -> Any:
    """As T5 has it: the model itself finds ``</s>`` in a text."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((text, -3.0) for text in [*"<>/sabcdefghijklmnopqrt\u2581", "ab"])]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def words() -> Any:
    vocabulary = {"[UNK]": 0, "<eos>": 1, "the": 2, "lamp": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="[UNK]")


@cache
def made_by_merges() -> Any:
    """A control token that the merges make too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    tokenizer.train_from_iterator(["<eos> " * 50, *SENTENCES], trainer)
    assert len(tokenizer.encode("<eos>").ids) == 1
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def as_gguf(tokenizer: Any) -> Any:
    """A tokenizer whose added tokens are in the vocabulary of its model too."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in definition["added_tokens"]:
        definition["model"]["vocab"].setdefault(token["content"], token["id"])
    other = Tokenizer.from_str(json.dumps(definition))
    return PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<|im_end|>", pad_token="<|endoftext|>")


class TestControlTokens:
    @pytest.mark.parametrize(
        ("tokenizer", "texts"),
        [
            (byte_level("<tool_call>", "</tool_call>"), "<tool_call> </tool_call> <|im_end|>"),
            (as_gguf(byte_level("<tool_call>", "</tool_call>")), "<tool_call> </tool_call> <|im_end|>"),
            (sentencepiece("<table>", "\n\n"), "<eos> <pad>"),
            (unigram(), "</s>"),
            (words(), "<eos>"),
            (made_by_merges(), "<eos>"),
        ],
        ids=["added only", "as converted from GGUF", "sentencepiece", "unigram", "words", "made by merges"],
    )
    def test_none_comes_out_of_a_text(self, tokenizer: Any, texts: str) -> None:
        own, _ = text_tokenizer(tokenizer, ())
        control = {*map(tokenizer.convert_tokens_to_ids, texts.split())} - {tokenizer.convert_tokens_to_ids("<pad>")}
        for text in texts.split():
            assert len(ids_of(tokenizer, text)) == 1
            for around in ("{}", "a {} b", "a{}b", "{}{}", "\n{}\n", " {}"):
                found = ids_of(own, around.format(text, text))
                assert found and not control & set(found), around

    def test_tokens_of_the_template_and_those_that_end_an_answer_are_control_tokens(self) -> None:
        tokenizer = sentencepiece("<table>", "<turn>", "\n")
        tokenizer.chat_template = "{{ '<turn>\n' }}{{ messages }}"
        own, _ = text_tokenizer(tokenizer, ())
        assert ids_of(own, "<table>\n") == ids_of(tokenizer, "<table>\n") and len(ids_of(own, "<turn>")) == 6
        tokenizer = sentencepiece("<table>", "<end>")
        (end,) = ids_of(tokenizer, "<end>")
        assert end in ids_of(text_tokenizer(tokenizer, ())[0], "<end>")
        assert end not in ids_of(text_tokenizer(tokenizer, (end,))[0], "<end>")

    def test_with_a_runtime(self, tmp_path: Path) -> None:
        """``<tool_call>`` of Qwen: added, and not special."""
        folder = build_model(tmp_path, TINY_MODELS["llama"])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
        tokenizer.save_pretrained(folder)
        runtime = load_model(str(folder))
        text = "He wrote <tool_call> into the log.<|im_end|>"
        tokens = runtime.tokenize(text)
        assert not set(tokens.ids) & set(runtime.tokenizer.added_tokens_decoder)
        assert runtime.decode_ids(tokens.ids) == text
        assert "".join(text[start:end] for start, end in tokens.offsets) == text
        assert len(runtime.tokenize("<tool_call>", control=True)) == 1


class TestOtherIds:
    @pytest.mark.parametrize("text", ["\n\n", "a\n\n\nb", "<table>", "a <table> b\n\n", " ", "<tab", "<table"])
    def test_added_tokens_of_the_base_vocabulary_are_text(self, text: str) -> None:
        tokenizer = sentencepiece("<table>", "\n", "\n\n")
        assert now(text_tokenizer(tokenizer, ())[0], text) == as_before(tokenizer, text)

    def test_runs_of_blanks_are_text(self) -> None:
        """Some tokenizers have them as added tokens outside the vocabulary; the tokens around are control tokens."""
        tokenizer = byte_level("<a>", "        ", "<b>", "\n\n\n", "<c>")
        own, _ = text_tokenizer(tokenizer, ())
        text = "x         y \n\n\n z"
        assert now(own, text) == as_before(tokenizer, text)
        assert {*ids_of(tokenizer, " " * 8), *ids_of(tokenizer, "\n\n\n")} <= set(ids_of(own, text))
        assert len({*ids_of(own, "<a><b><c>")} & {*tokenizer.added_tokens_decoder}) == 0

    @pytest.mark.parametrize(
        "make",
        [byte_level, lambda: byte_level("<think>"), lambda: sentencepiece("\n", "<h1>"), unigram, made_by_merges],
    )
    @examples(150)
    @given(text=ALIKE)
    def test_are_as_before(self, make: Callable[[], Any], text: str) -> None:
        tokenizer = make()
        if any(token in text for token in ("<think>", "</s>", "<eos>")):
            return
        before = as_before(tokenizer, text)
        if tokenizer.eos_token_id in before[0]:
            return  # "<|eos>" for a vocabulary without "|", which is dropped
        assert now(text_tokenizer(tokenizer, ())[0], text) == before

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.weights), "smollm2-135m"])
    def test_of_real_tokenizers(self, name: str) -> None:
        compare_on_varied_texts(AutoTokenizer.from_pretrained(resolve(name)))


PIECES = [
    *(*SENTENCES, *"\n|\n\n\n|  |\t|    |\r\n|<table>|</td>|<h1>|im_end|_call".split("|"), "<|", "|>"),
    *("Gr\u00fc\u00dfe", "e\u0301", "\u4f60\u597d", "\u0645\u0631\u062d\u0628\u0627"),
    *("\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001f469\u200d\U0001f680", "\u200b", "\u00a0", "\x00", "\ufeff"),
    *("\ufffd", "3.14", "1847", "def f(x):\n    return x"),
]


def compare_on_varied_texts(tokenizer: Any) -> None:
    """Texts of many scripts, spacings and markup give the ids and offsets that they gave before."""
    own, _ = text_tokenizer(tokenizer, ())
    draw = random.Random(0)
    for _ in range(400):
        text = draw.choice(["", " "]).join(draw.choices(PIECES, k=draw.randrange(1, 12)))
        assert now(own, text) == as_before(tokenizer, text), repr(text)


class TestThreads:
    @pytest.mark.long
    def test_a_long_text_does_not_hold_up_others(self, tiny_models: dict[str, str]) -> None:
        runtime, answers = load_model(tiny_models["llama"]), 0
        text = "".join(f"{number} lamps. " for number in range(50_000))
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(runtime.tokenize, text)
            while not working.done():
                runtime.tokenize("What?")
                answers += 1
                time.sleep(0.001)
        assert answers > 20

    def test_a_callers_own_settings_do_not_matter(self, tiny_models: dict[str, str]) -> None:
        runtime = load_model(tiny_models["qwen2"])
        before = runtime.tokenize(SENTENCES[0])
        runtime.tokenizer(SENTENCES[0], truncation=True, max_length=3, split_special_tokens=True)
        assert runtime.tokenize(SENTENCES[0]) == before
        assert len(runtime.tokenize("<|im_end|>", control=True)) == 1 < len(runtime.tokenize("<|im_end|>"))


class TestLeastTokens:
    @examples(150)
    @given(text=ALIKE | st.text())
    def test_is_never_more_than_there_are(self, text: str) -> None:
        for normalizer in (None, normalizers.NFC()):
            tokenizer = make_tokenizer(400)
            if normalizer is not None:
                tokenizer.backend_tokenizer.normalizer = normalizer
            own, _ = text_tokenizer(tokenizer, ())
            least = LeastTokens.of(own)
            assert least is not None and least(text) <= len(ids_of(own, text))

    def test_is_reached(self) -> None:
        own, _ = text_tokenizer(make_tokenizer(400), ())
        least = LeastTokens.of(own)
        assert least is not None
        longest = max((text for text in own.get_vocab() if text.isascii() and text.isalpha()), key=len)
        assert least("a" * 10 * least.longest) == 10 and least.longest >= len(longest)

    def test_bytes_without_a_token_do_not_count(self) -> None:
        """Byte-level BPE drops them without a word."""
        vocabulary = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet()) if letter != "z"}
        tokenizer = Tokenizer(models.BPE({text: n for n, text in enumerate(vocabulary)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        least = LeastTokens.of(own)
        assert least is not None and least("zzzzazz") == len(ids_of(own, "zzzzazz")) == 1

    @pytest.mark.parametrize("tokenizer", [sentencepiece(), unigram(), words(), made_by_merges()])
    def test_where_it_is_not_certain_there_is_none(self, tokenizer: Any) -> None:
        assert LeastTokens.of(tokenizer) is None

    def test_nor_with_a_normalizer(self) -> None:
        tokenizer = make_tokenizer(400)
        tokenizer.backend_tokenizer.normalizer = normalizers.Strip()
        assert LeastTokens.of(tokenizer) is None

    def test_nor_with_a_step_that_drops_text(self) -> None:
        tokenizer = make_tokenizer(400)
        steps = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        assert LeastTokens.of(tokenizer) is None
