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

``again`` is full prefill in two steps, the exact KV of the first half before the rest: its differences are those of
rounding. Prints per edit the share of the prompt's tokens that is not computed, the KL divergence of the first token,
and of those along full prefill's answer, equal first tokens and answers, and the time to the first token over plain
prefill's. Questions in the log are not asked again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cacheclip_lab.evaluation.edits import Chat, edits, measured_edits
from cacheclip_lab.evaluation.records import Record
from resumed import ask_each, spread

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import processor_name

ANSWER_TOKENS = 24


def of_question(records: Sequence[Record], count: int) -> dict[str, tuple[Chat, Chat]]:
    """The earlier prompt and the one that is asked, by edit, for the first record."""
    record = records[0]
    words = set(record.question.lower().split())
    own = sorted({chunk.text for chunk in record.chunks}, key=lambda text: -len(words & set(text.lower().split())))
    others = [chunk.text for each in records[1:] for chunk in each.chunks]
    *texts, foreign = [*dict.fromkeys([*own, *others])][: count + 1]
    return edits(sorted(texts), foreign, record.question)


def measured(engine: CacheClipEngine, pairs: dict[str, tuple[Chat, Chat]]) -> Iterator[dict[str, Any]]:
    for each in measured_edits(engine, pairs, engine.make_method(), ANSWER_TOKENS, answers=True):
        yield {
            "edit": each.edit,
            "tokens": each.stats.prompt_tokens,
            "reused": each.stats.reused_tokens,
            "first_kl": each.fidelity.first_token_kl,
            "kl": each.fidelity.answer_kl,
            "first": each.fidelity.first_agrees,
            "answer": each.same_answer,
            "full_confidence": each.full_confidence,
            "ttft": each.stats.ttft_s / each.full.ttft_s,
        }


def table(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "edit        not computed  first KL mean (median)  answer KL  first token  answer   time to the first token"
    for rows in zip(*(item["edits"] for item in items), strict=True):
        share = statistics.fmean(row["reused"] / row["tokens"] for row in rows)
        kl = [row["first_kl"] for row in rows]
        along, first, whole = (statistics.fmean(row[name] for row in rows) for name in ("kl", "first", "answer"))
        seconds = statistics.median(row["ttft"] for row in rows)
        yield (
            f"{rows[0]['edit']:11} {share:12.0%}  {statistics.fmean(kl):13.4f} ({statistics.median(kl):.4f}) "
            f"{along:10.4f} {first:12.0%}  {whole:6.0%}  {seconds:8.3f}"
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
        return {"id": name, "edits": [*measured(engine, pairs)]}

    items = ask_each(args.log, {name: name for name in names}, asked)
    print(f"{len(items)} questions, {args.primary}, {args.dtype}, {processor_name()}")
    print("\n".join(table(items)))


if __name__ == "__main__":
    main()
