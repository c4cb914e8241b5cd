"""Prompts that are earlier prompts with an edit: how near is moved KV to full prefill, and how much sooner?

    python benchmarks/edits.py --dataset 2wikimqa.jsonl.gz --half dev --limit 50 --log FILE

Passages of each question, and of other questions up to ``--passages``, stand in a prompt as messages, the question
last. An earlier prompt differs in one edit, and was answered by plain prefill:

    header      another checksum in the first line
    deleted     a passage stood after the first one, which is gone
    replaced    the second passage was another one
    inserted    the first passage is new
    reversed    the passages stood in the other order
    summarised  the first three passages stood there whole, which are a summary now

``again`` asks for full prefill in two steps, the exact KV of the first half before the rest: its differences are those
of rounding. Prints per edit the share of the prompt's tokens that is not computed, the KL divergence of the first token
from full prefill's, equal first tokens and answers, and the time to the first token over plain prefill's. Questions in
the log are not asked again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cacheclip_lab.evaluation.edits import Chat, edits
from cacheclip_lab.evaluation.records import Record
from resumed import ask_each, spread

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import kl_divergence, processor_name

ANSWER = SamplingParams(max_tokens=24)


def of_question(records: Sequence[Record], count: int) -> dict[str, tuple[Chat, Chat]]:
    """The earlier prompt and the one that is asked, by edit, for the first record."""
    record = records[0]
    words = set(record.question.lower().split())
    own = sorted({chunk.text for chunk in record.chunks}, key=lambda text: -len(words & set(text.lower().split())))
    others = [chunk.text for each in records[1:] for chunk in each.chunks]
    *texts, foreign = [*dict.fromkeys([*own, *others])][: count + 1]
    return edits(sorted(texts), foreign, record.question)


def measured(engine: CacheClipEngine, old: Chat, new: Chat) -> dict[str, Any]:
    """Plain prefill, the same in two steps, and moved KV."""

    engine.prefixes.clear()
    plain = engine.generate(new, ANSWER, method="full")
    logits = engine.prefill(new, ANSWER, method=engine.make_method("full")).logits
    found: dict[str, Any] = {"tokens": plain.stats.prompt_tokens}
    for way in ("again", "moved"):
        engine.prefixes.clear()
        before = new[: len(new) // 2] if way == "again" else old
        engine.generate(before, SamplingParams(max_tokens=1), method="prefix")
        other = engine.prefill(new, ANSWER, method=engine.make_method("prefix" if way == "again" else None)).logits
        answer = engine.generate(new, ANSWER, method="prefix" if way == "again" else None)
        stats = answer.stats
        found[way] = {
            "kl": float(kl_divergence(logits, other)),
            "first": bool(answer.token_ids[0] == plain.token_ids[0]),
            "answer": answer.text == plain.text,
            "moved": stats.moved_tokens,
            "past": stats.moved_past,
            "reused": stats.reused_tokens,
            "ttft": stats.ttft_s / plain.stats.ttft_s,
        }
    return found


def table(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "edit        not computed  KL mean (median)    first token  answer   time to the first token"
    for edit in items[0]["edits"]:
        for way in ("again", "moved"):
            rows = [item["edits"][edit][way] for item in items]
            tokens = [item["edits"][edit]["tokens"] for item in items]
            share = statistics.fmean(row["reused"] / count for row, count in zip(rows, tokens, strict=True))
            kl = [row["kl"] for row in rows]
            first, whole = (statistics.fmean(row[name] for row in rows) for name in ("first", "answer"))
            seconds = statistics.median(row["ttft"] for row in rows)
            yield (
                f"{edit if way == 'moved' else '  again':11} {share:12.0%}  {statistics.fmean(kl):.4f} "
                f"({statistics.median(kl):.4f})  {first:11.0%}  {whole:6.0%}  {seconds:8.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", required=True, help="files, comma-separated")
    parser.add_argument("--half", choices=("dev", "test"), default=None)
    parser.add_argument("--limit", type=int, default=50, help="questions")
    parser.add_argument("--passages", type=int, default=20, help="in each prompt")
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line; read again at start")
    args = parser.parse_args()
    engine = CacheClipEngine(
        primary=args.primary,
        auxiliary=None,
        dtype=args.dtype,
        on_miss="ignore",
        min_confidence=0.0,
        prefix_cache_bytes=2**30,
    )
    records = spread(args.dataset, half=args.half, limit=args.limit)
    names = [*records]

    def asked(name: str) -> dict[str, Any]:
        at = names.index(name)
        pairs = of_question([records[each] for each in [*names[at:], *names[:at]]], args.passages)
        return {"id": name, "edits": {edit: measured(engine, *pair) for edit, pair in pairs.items()}}

    items = ask_each(args.log, {name: name for name in names}, asked)
    print(f"{len(items)} questions, {args.primary}, {args.dtype}, {processor_name()}")
    print("\n".join(table(items)))


if __name__ == "__main__":
    main()
