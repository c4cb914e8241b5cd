"""The auxiliary's scores for a prompt: what the chunks are asked, once and twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheclip_rag import CacheClipEngine, Chunk, EngineConfig
from cacheclip_rag.clock import PhaseClock
from cacheclip_rag.lab.training.measures import chosen, token_recall
from cacheclip_rag.prompt.layout import Span
from cacheclip_rag.selection import scoring as module
from cacheclip_rag.selection.heads import HeadSet, weights_digest
from cacheclip_rag.selection.scorers import AuxiliaryAttention
from cacheclip_rag.selection.scoring import MAX_QUESTION_TOKENS, AuxiliaryScorer, Question
from cacheclip_rag.selection.sentences import sentence_spans
from tests.conftest import CHUNKS, QUESTION, lose
from tests.training.planted import PLANTED, build_planted


class Asked:
    """A scorer whose looks are recorded."""

    def __init__(self, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, heads: Any = None) -> None:
        self.caches = CacheClipEngine(config).parts.auxiliary_caches
        self.runtime = self.caches.runtime
        self.scorer = AuxiliaryScorer(self.caches, heads(self.runtime) if heads else None)
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
    return Asked(EngineConfig(primary=tiny_models["llama"], auxiliary=tiny_models["auxiliary"]), monkeypatch)


def best_sentence(asked: Asked, chunks: list[str], scores: list[torch.Tensor]) -> str:
    """Of highest mean score, sentence by sentence."""
    best = []
    for chunk, score in zip(chunks, scores, strict=True):
        tokens = asked.caches.tokenize(chunk)
        for start, end in sentence_spans(chunk):
            inside = [n for n, (_, stop) in enumerate(tokens.offsets) if start < stop <= end + (end < len(chunk))]
            best.append((float(score[inside].mean()), chunk[start:end]))
    return max(best)[1]


class TestSecondPass:
    def test_it_asks_with_the_best_sentence_before_the_question(self, asked: Asked) -> None:
        asked(CHUNKS, QUESTION, passes=2, pooled=True)
        (first, scores), (second, _) = asked.looks
        assert second[-len(first) :] == first == asked.runtime.tokenize(QUESTION).ids
        before = asked.runtime.decode_ids(list(second[: -len(first)]))
        assert before.strip() == best_sentence(asked, CHUNKS, scores)

    def test_a_score_is_the_larger_of_the_two(self, asked: Asked) -> None:
        found = asked(CHUNKS, QUESTION, passes=2, pooled=True)
        (_, once), (_, again) = asked.looks
        largest = [torch.maximum(a, b) for a, b in zip(once, again, strict=True)]
        for ours, expected in zip(found, largest, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
        assert any(bool((a > b).any()) for a, b in zip(once, again, strict=True))
        assert any(bool((b > a).any()) for a, b in zip(once, again, strict=True))

    def test_a_long_question_takes_no_room_from_the_sentence(self, asked: Asked) -> None:
        question = " ".join([QUESTION] * 12)
        asked(CHUNKS, question, passes=2, pooled=True)
        (first, scores), (second, _) = asked.looks
        assert len(first) == MAX_QUESTION_TOKENS < len(asked.runtime.tokenize(question).ids)
        assert second[-len(first) :] == first and len(second) > len(first) + 1
        assert best_sentence(asked, CHUNKS, scores) in asked.runtime.decode_ids(list(second[: -len(first)]))

    def test_of_a_long_sentence_the_best_stretch(self, asked: Asked) -> None:
        long = " and ".join(chunk.rstrip(".").replace(". ", ", ") for chunk in CHUNKS)
        asked([long], QUESTION, passes=2, pooled=True)
        (first, [score]), (second, _) = asked.looks
        ids = asked.caches.tokenize(long).ids
        start = int(score.unfold(0, 64, 1).mean(-1).argmax())
        assert len(ids) > 64 and second[:64] == ids[start : start + 64]
        assert len(second) == len(first) + 65, "a line break stands between"

    def test_without_room_for_the_sentence_it_asks_once(self, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
        longest = max(len(asked.caches.tokenize(chunk)) for chunk in CHUNKS)
        room = len(asked.caches.prefix_ids) + longest + len(asked.runtime.tokenize(QUESTION).ids)
        monkeypatch.setattr(asked.runtime, "reuse_tokens", room)
        asked(CHUNKS, QUESTION, passes=2, pooled=True)
        assert len(asked.looks) == 1
        monkeypatch.setattr(asked.runtime, "reuse_tokens", room + 4)
        asked(CHUNKS, QUESTION, passes=2, pooled=True)
        (first, _), (second, _) = asked.looks
        assert len(second) == len(first) + 4

    def test_it_finds_evidence_that_shares_no_word_with_the_question(
        self, tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The head attends to equal words: the question leads to the town, and the town to who governs it."""
        config = EngineConfig(
            primary=tiny_models["llama"], auxiliary=build_planted(tmp_path_factory.mktemp("planted") / "model")
        )
        planted = Asked(
            config,
            monkeypatch,
            lambda runtime: HeadSet(weights_digest(runtime.fingerprint), (PLANTED,), torch.ones(1), sinks=4),
        )
        filler = "Apples from this valley are small, sour and very good for cider."
        hop, evidence = "Later Anselm Branbach moved to Alderford.", "Alderford answers to Hedda Kelmere."
        chunks = [
            f"{filler} {evidence} Rain fell for nine days, and the hay was lost.",
            f"{filler} Birchwick answers to Petra Rosgrave. Bread was dear that winter.",
            f"{filler} {hop} Nobody remembers why.",
            f"{filler} Deepcliff answers to Magnus Torland. The carpenter charged little, and took his time.",
        ]
        question = "Who governs the place where Anselm Branbach lives?"
        shared = {word.strip(".,?").lower() for word in question.split()} & {
            word.strip(".,?").lower() for word in evidence.split()
        }
        assert not shared
        recalls = []
        for passes in (1, 2):
            scores = torch.cat(planted(chunks, question, passes=passes))
            lengths = [len(planted.caches.tokenize(chunk)) for chunk in chunks]
            wanted = torch.zeros(sum(lengths), dtype=torch.bool)
            start = chunks[0].index(evidence)
            for number, (first, stop) in enumerate(planted.caches.tokenize(chunks[0]).offsets):
                wanted[number] = stop > start and first < start + len("Alderford")
            recalls.append(float(token_recall(chosen(scores, lengths, 0.2), wanted)))
        assert recalls == [0.0, 1.0]
        before = planted.looks[1][0][: -len(planted.looks[0][0])]
        assert planted.runtime.decode_ids(list(before)).strip() == hop


class TestQuestion:
    def test_of_a_long_one_the_last_tokens(self, asked: Asked) -> None:
        text = " ".join([QUESTION] * 12)
        whole, found = asked.runtime.tokenize(text), Question.of(asked.runtime, text)
        assert found.ids == whole.ids[-MAX_QUESTION_TOKENS:]
        asked(CHUNKS, text)
        assert asked.looks[0][0] == found.ids


class TestDamage:
    def test_a_chunk_that_cannot_be_read_is_computed_behind_its_own_prefix(
        self, asked: Asked, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here and now, with the very KV that was stored: the scores stay what they are."""
        for chunk in CHUNKS:
            asked.caches.write(chunk)
        expected = asked(CHUNKS, QUESTION)
        lose(monkeypatch, asked.caches, CHUNKS[1])
        found = asked(CHUNKS, QUESTION)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)  # stored as bfloat16
        encode = type(asked.runtime).encode
        monkeypatch.setattr(type(asked.runtime), "encode", lambda self, ids, prefix=None: encode(self, ids))
        wrong = asked(CHUNKS, QUESTION)
        assert float((wrong[1] - expected[1]).abs().max()) > 1e-2, "without its prefix it reads otherwise"
