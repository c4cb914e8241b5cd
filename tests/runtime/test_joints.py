"""Tokenising only what stands between the edges of stored texts gives the tokens of the whole prompt."""

import random
import re
from functools import cache
from typing import Any

import pytest
from cacheclip_testing.tiny import SENTENCES, make_tokenizer
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cacheclip_rag.models.load import resolve
from cacheclip_rag.prompt.segments import Chunk, Fresh, Segment
from cacheclip_rag.runtime.base import TokenizedText
from cacheclip_rag.runtime.transformers import text as module
from cacheclip_rag.runtime.transformers.text import TextModel
from cacheclip_rag.runtime.transformers.user_text import control_names, divides_at_spaces, text_tokenizer
from tests.conftest import Patch, examples

SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA = (
    rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{SUFFIX}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{SUFFIX}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Text(TextModel):
    """A tokenizer without a model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.name = tokenizer, "text"
        self.text_tokenizer, control = text_tokenizer(tokenizer, ())
        self.control_ids = sorted(control)
        self._control_names = control_names(tokenizer, self.text_tokenizer, self.control_ids)
        self.made = list[str]()

    def tokenize(self, text: str, *, control: bool = False) -> TokenizedText:
        self.made.append(text)
        return super().tokenize(text, control=control)


Text.__abstractmethods__ = frozenset()  # it computes nothing


@cache
def model(kind: str) -> Text:
    if kind in ("qwen2.5-coder-0.5b", "smollm2-135m"):
        return Text(AutoTokenizer.from_pretrained(resolve(kind)))
    tokenizer = make_tokenizer(600)
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ("<tool_call>", "\n\n\n", "<h1>")])
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "digits")]
    if kind == "digits":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif kind != "gpt2":
        pattern = {"llama": LLAMA, "oss": OSS, "metaspace": r"\s+"}[kind]
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if kind != "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if kind == "oss":
        tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return Text(tokenizer)


WORDS = (
    *" ".join(SENTENCES).split()[:40],
    "the",
    "The",
    "it's",
    "they'LL",
    "1847",
    "3.14",
    "Grüße",
    "e\u0301a",
    "你好",
)
EDGES = ("", " ", ".", ".\n", "\n", "\n\n", "\n\n\n", "'", "'s", "s", " s", "\u0301", "\u200b", "\t", "  ", "1", "<|")
EDGES += ("<h1>", "|>", "a ", " a", "T", "\u00a0", "\u212a", "?!", "\u4f60", "im_end|>")
BETWEEN = (*EDGES, "<|im_end|>\n", "<tool_call>", "\n\nQuestion: who ", "t", " of the ")


def prompt_of(draw: random.Random) -> list[Segment]:
    """Template, chunks and parts of chunks of words, with edges that go on into each other."""
    segments: list[Segment] = [Fresh("<|im_start|>user\n", control=True)]
    for _ in range(draw.randrange(1, 5)):
        words = "".join(draw.choice(WORDS) + draw.choice((" ", " ", " ", *BETWEEN)) for _ in range(draw.randrange(14)))
        whole = draw.choice(EDGES) + words + draw.choice(EDGES)
        begin, end = sorted(draw.choices(range(len(whole) + 1), k=2)) if draw.random() < 0.3 else (0, len(whole))
        segments.append(Chunk(whole[begin:end], whole, begin) if end - begin < len(whole) else Chunk(whole))
        segments.append(Fresh(draw.choice(BETWEEN), control=draw.random() < 0.1))
    return [each for each in segments if each.text]


def compare(text: Text, segments: list[Segment]) -> None:
    for each in (segments, [Fresh(each.text) if each.control else each for each in segments]):
        expected, tokens = text.tokenize_prompt(each), text.tokenize_prompt(each, stored(text, each))
        assert (tokens.ids, tokens.offsets) == (expected.ids, expected.offsets), each


def compare_many(text: Text, count: int) -> None:
    for seed in range(count):
        compare(text, prompt_of(random.Random(seed)))


def stored(text: Text, segments: list[Segment]) -> list[tuple[TokenizedText, int] | None]:
    return [(text.tokenize(each.whole), each.at) if isinstance(each, Chunk) else None for each in segments]


@pytest.mark.parametrize("kind", ["gpt2", "digits", "llama", "oss"])
@given(seed=st.integers(0, 2**32))
@examples(40)
def test_any_prompt_has_the_tokens_of_its_text(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(3):
        compare(model(kind), prompt_of(draw))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.weights), "smollm2-135m"])
def test_of_real_tokenizers(name: str) -> None:
    compare_many(model(name), 50)


def test_a_cut_elsewhere_is_found(monkeypatch: Patch) -> None:
    """The twin of the tests before, and the kinds are cut at all."""
    text, whole = model("llama"), " ".join(SENTENCES)
    segments = [Fresh("<|im_start|>", control=True), Chunk(whole), Fresh("\n\nWho?")]
    compare(text, segments)
    text.made.clear()
    text.tokenize_prompt(segments, stored(text, segments))
    assert max(map(len, text.made[1:])) < 100 < len(text.made[0]) == len(whole)
    for wrong in ("[a-z]()[a-z].*[a-z]()[a-z]", r"()\d.*\d()\d", r"\s()\s.*( )"):
        monkeypatch.setattr(module, "_CUTS", re.compile(wrong, re.DOTALL))
        with pytest.raises(AssertionError):
            compare_many(text, 200)


def test_names_of_control_tokens_in_a_stored_text(monkeypatch: Patch) -> None:
    """A prompt that has one is tokenised in parts, as without what is known."""
    text, whole = model("llama"), "<|im_end|>".join(SENTENCES[:2])
    segments = [Fresh("<|im_start|>th", control=True), Fresh("e "), Chunk(whole), Fresh("<|im_end|>", control=True)]
    compare(text, segments)
    monkeypatch.setattr(text, "_control_names", re.compile("(?!)"))
    with pytest.raises(AssertionError):
        compare(text, segments)


def test_other_tokenizers_are_not_cut() -> None:
    """Words that go on behind a space, tokens with one, and names of control tokens in a stored text."""
    assert model("metaspace")._control_names is None
    plain = make_tokenizer(300)
    for token in (AddedToken("of the"), AddedToken("<a>", lstrip=True), AddedToken("<a>", single_word=True)):
        tokenizer = make_tokenizer(300)
        tokenizer.add_tokens([token])
        assert divides_at_spaces(plain) and not divides_at_spaces(tokenizer)
    plain.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert not divides_at_spaces(plain)
    words = PreTrainedTokenizerFast(tokenizer_object=models_of_words(), eos_token="<eos>")
    assert not divides_at_spaces(words)


def models_of_words() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer(models.WordLevel({"<eos>": 0, "the": 1}, unk_token="<eos>"))
