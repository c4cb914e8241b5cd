"""The auxiliary's scores for a prompt: what the chunks are asked."""

from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, EngineConfig
from cacheclip_rag.base.clock import PhaseClock
from cacheclip_rag.prompt.layout import Span
from cacheclip_rag.selection import auxiliary_pass as module
from cacheclip_rag.selection.auxiliary_pass import MAX_QUESTION_TOKENS, AuxiliaryPass, question_ids, score_chunks
from cacheclip_rag.selection.scorers import AuxiliaryAttention
from tests.conftest import CHUNKS, QUESTION, lose


class Asked:
    """A scorer whose looks are recorded."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caches = CacheClipEngine(config).parts.models.auxiliary_caches
        self.runtime = self.caches.runtime
        self.scorer = AuxiliaryPass(self.caches, None)
        self.looks: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []
        original = module.score_chunks

        def score_chunks(runtime: Any, prefix: Any, chunks: Any, ids: Any, *args: Any, **options: Any) -> Any:
            found = original(runtime, prefix, chunks, ids, *args, **options)
            self.looks.append((tuple(ids), found))
            return found

        monkeypatch.setattr(module, "score_chunks", score_chunks)

    def __call__(self, chunks: list[str], question: str, **options: Any) -> list[torch.Tensor]:
        """Scores in the auxiliary's own tokens; the looks are those of this call."""
        self.looks.clear()
        spans = [Span(Chunk(text), self.caches.tokenize(text), number) for number, text in enumerate(chunks)]
        found = self.scorer.score(spans, question, AuxiliaryAttention(**options), PhaseClock())
        order = sorted(range(len(chunks)), key=lambda number: len(spans[number].tokens))  # as it looks at them
        self.looks = [
            (ids, [scores[order.index(number)] for number in range(len(chunks))]) for ids, scores in self.looks
        ]
        return found


@pytest.fixture
def asked(tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
    return Asked(EngineConfig(**models, codec="float32"), monkeypatch)


def test_of_a_long_question_the_last_tokens(asked: Asked) -> None:
    text = " ".join([QUESTION] * 12)
    whole, found = asked.runtime.tokenize(text), question_ids(asked.runtime, text)
    assert found == whole.ids[-MAX_QUESTION_TOKENS:]
    asked(CHUNKS, text)
    assert asked.looks[0][0] == found


def test_a_chunk_that_cannot_be_read_is_computed_behind_its_own_prefix(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here and now, with the very KV that was stored: the scores stay what they are."""
    for chunk in CHUNKS:
        asked.caches.write(chunk)
    expected = asked(CHUNKS, QUESTION)
    lose(monkeypatch, asked.caches, CHUNKS[1])
    found = asked(CHUNKS, QUESTION)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    encode = type(asked.runtime).encode
    monkeypatch.setattr(type(asked.runtime), "encode", lambda self, ids, prefix=None: encode(self, ids))
    wrong = asked(CHUNKS, QUESTION)
    assert float((wrong[1] - expected[1]).abs().max()) > 1e-2, "without its prefix it reads otherwise"


class TestParts:
    WHOLE = " ".join(CHUNKS)

    def by_hand(self, asked: Asked, part: str, tokens: Any, first: str, last: str) -> list[float]:
        """Scores of a part's tokens: KV of the whole text, of which the question sees the tokens from the first part's
        first character to the last part's last one; then the largest of those that share a character."""
        caches, whole = asked.caches, asked.caches.tokenize(self.WHOLE)
        begin, end = self.WHOLE.index(first), self.WHOLE.index(last) + len(last)
        seen = [n for n, (a, b) in enumerate(whole.offsets) if a < end and b > begin]
        kv = asked.runtime.encode(whole.ids, caches.prefix.kv)[:, :, :, seen[0] : seen[-1] + 1]
        [raw] = score_chunks(asked.runtime, caches.prefix.kv, [kv], question_ids(asked.runtime, QUESTION))
        at = self.WHOLE.index(part)
        sources = [(*whole.offsets[n], float(score)) for n, score in zip(seen, raw, strict=True)]
        return [
            max((score for a, b, score in sources if a < at + stop and b > at + start), default=0.0)
            for start, stop in tokens.offsets
        ]

    @pytest.mark.some(3)
    @pytest.mark.parametrize("lost", [False, True])
    @pytest.mark.parametrize("numbers", [[1], [2], [0, 2], [2, 1]])
    def test_a_part_has_the_scores_of_its_own_tokens(
        self, asked: Asked, monkeypatch: pytest.MonkeyPatch, numbers: list[int], lost: bool
    ) -> None:
        asked.caches.write(self.WHOLE)
        if lost:
            lose(monkeypatch, asked.caches, self.WHOLE)
        parts = [CHUNKS[number][5:-7] for number in numbers]
        spans = [
            Span(Chunk(part, self.WHOLE, self.WHOLE.index(part)), asked.caches.tokenize(part), 100 * number)
            for number, part in enumerate(parts)
        ]
        found = asked.scorer.score(spans, QUESTION, AuxiliaryAttention(layers="last"), PhaseClock())
        first, last = CHUNKS[min(numbers)][5:-7], CHUNKS[max(numbers)][5:-7]
        for part, span, scores in zip(parts, spans, found, strict=True):
            expected = self.by_hand(asked, part, span.tokens, first, last)
            assert scores.tolist() == pytest.approx(expected, abs=1e-5) and max(expected) > 1e-3
