"""Prompts that are earlier prompts with an edit: how near to full prefill is KV that is moved there?

Passages stand in a conversation as what tools found, and the question comes last. The earlier prompt was answered by
plain prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cacheclip_rag import CacheClipEngine, FusionStats
from cacheclip_rag.measuring import Prefilled, confidence
from cacheclip_rag.methods import Method, preset

from .fidelity import Fidelity
from .reference import Reference

Chat = list[dict[str, Any]]
_RULES = "You are careful. Answer the user's question from the tool results above it, in as few words as possible."


@dataclass(frozen=True, slots=True)
class EditOutcome:
    """One edited prompt."""

    edit: str
    fidelity: Fidelity
    same_answer: bool
    """Whether the greedy answer is full prefill's; only meant where answers were asked for."""
    stats: FusionStats
    full: FusionStats
    """Of full prefill."""
    full_confidence: float | None = None
    """Full prefill's, of the first token of its answer that is another one here; None if there is none."""


def chat(header: str, passages: Sequence[str], question: str) -> Chat:
    """Each passage has a short answer of the assistant."""
    messages = [{"role": "system", "content": f"x-billing: version=2.1.173; checksum={header};\n{_RULES}"}]
    for passage in passages:
        messages.append({"role": "user", "content": f"<tool_response>\n{passage}\n</tool_response>"})
        messages.append({"role": "assistant", "content": "Noted."})
    return [*messages, {"role": "user", "content": question}]


def edits(passages: Sequence[str], foreign: str, question: str) -> dict[str, tuple[Chat, Chat]]:
    """The earlier prompt and the one that is asked, by edit: another checksum in the first line; a passage that stood
    after the first one is gone; the second one was another one; the first one is new; all stood in the other order; the
    first three were whole, and are a summary now."""
    summary = "\n".join(text[:80] for text in passages[:3])

    def asked(texts: Sequence[str], header: str = "07c2e") -> Chat:
        return chat(header, texts, question)

    now = asked(passages)
    return {
        "header": (asked(passages, "a91f3"), now),
        "deleted": (asked([passages[0], foreign, *passages[1:]]), now),
        "replaced": (asked([passages[0], foreign, *passages[2:]]), now),
        "inserted": (asked(passages[1:]), now),
        "reversed": (asked(passages[::-1]), now),
        "summarised": (now, asked([summary, *passages[3:]])),
    }


def measured_edits(
    engine: CacheClipEngine,
    pairs: dict[str, tuple[Chat, Chat]],
    method: Method,
    max_tokens: int,
    *,
    answers: bool = False,
) -> Iterator[EditOutcome]:
    """One outcome an edit. ``answers``: with greedy answers of its own, up to ``max_tokens`` tokens; and first
    ``again``, full prefill in two steps: the exact KV of the first half before the rest."""
    steps = [(edit, old, new, method) for edit, (old, new) in pairs.items()]
    if answers:
        new = steps[0][2]
        steps.insert(0, ("again", new[: len(new) // 2], new, preset("prefix")))
    asked: Chat = []
    held: dict[str, Prefilled] = {}  # two: memory has room for few prompts' KV
    for edit, old, new, by in steps:
        earlier = _prefilled(engine, old, held.values())
        if new != asked:  # most edits lead to the same prompt
            asked, plain = new, engine.prefill(new, method=preset("full"))
            reference = Reference.of(engine, plain, max_tokens)
            held["full"] = plain
        held["earlier"] = earlier
        engine.prefixes.clear()
        _keep(engine, earlier)
        prefilled = engine.prefill(new, method=by, moved="on")
        followed = reference.follow(prefilled, answers=answers)
        at, same = followed.differs_at, followed.answer == reference.answer
        sure = None if at is None else confidence(reference.logits[at])
        yield EditOutcome(edit, followed.fidelity, same, prefilled.stats, plain.stats, sure)
    engine.prefixes.clear()


def _prefilled(engine: CacheClipEngine, prompt: Chat, others: Iterable[Prefilled]) -> Prefilled:
    """A prompt by plain prefill. What it begins with like one of the others is not computed again."""
    engine.prefixes.clear()
    for each in others:
        _keep(engine, each)
    return engine.prefill(prompt, method=preset("prefix"))


def _keep(engine: CacheClipEngine, prefilled: Prefilled) -> None:
    cache: Any = prefilled.cache
    engine.prefixes.insert(prefilled.layout.token_ids, cache)
