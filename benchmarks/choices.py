"""Does reuse change which passages a reranker chooses? Rank agreement with full prefill, beside two noise floors.

    python benchmarks/choices.py --dataset 2wikimqa.jsonl.gz,hotpotqa.jsonl.gz --limit 60 --log FILE

The prompt is that of LlamaIndex's ``LLMRerank``, its passages numbered from 1 to 9, with ``Doc:`` as the beginning of
the answer. The next token is the chosen passage, and the logits of the nine numbers rank them. arXiv:2601.08343 says
that reuse keeps accuracy and changes choices. Ways:

    again      full prefill with its sums in another order
    reordered  full prefill with the passages in another order, by passage
    direct     stored chunks as they are
    METHOD     at --ratio

Prints for each way Kendall's tau and the share of equal first choices with full's, and the mean rank of the best
passage that the data set calls right. A method below ``reordered`` should not choose: give rerankers, routers and
agents an LLM with ``method="full"``. Questions in the log are not asked again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from cacheclip_lab.evaluation.records import Record
from cacheclip_lab.evaluation.statistics import paired_ratio
from llama_index.core.prompts.default_prompts import DEFAULT_CHOICE_SELECT_PROMPT
from resumed import ask_each, spread

from cacheclip_rag import CacheClipEngine, Chunk, Fresh
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.methods import Method, preset

MOST = 9
"""Passages whose number is one token."""
BEGINNING = "Doc:"


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Tau-b of two lists of scores: 1 for the same order, -1 for the opposite one, 0 if all of one are equal."""
    pairs = itertools.combinations(range(len(one)), 2)
    signs = np.sign([(one[a] - one[b], other[a] - other[b]) for a, b in pairs])
    untied = np.abs(signs).sum(axis=0)
    return float(signs.prod(axis=1).sum() / np.sqrt(untied.prod())) if untied.all() else 0.0


def prompt_of(engine: CacheClipEngine, question: str, texts: Sequence[str]) -> list[Chunk | Fresh]:
    listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, 1))
    asked = DEFAULT_CHOICE_SELECT_PROMPT.format(context_str=listed, query_str=question)
    return [*engine.segment([{"role": "user", "content": asked}], texts), Fresh(BEGINNING)]


def numbers(engine: CacheClipEngine, count: int) -> list[int]:
    """The token of each number after the beginning; a token of its own for the space is left out."""
    found = [engine.primary.tokenize(f"{BEGINNING} {number}").ids[-1] for number in range(1, count + 1)]
    if len(set(found)) < count:
        raise SystemExit("expected a tokenizer with a token for each number from 1 to 9: choose another primary")
    return found


def scores(
    engine: CacheClipEngine, question: str, texts: Sequence[str], method: Method, *, again: bool = False
) -> tuple[list[float], float]:
    """Log-probabilities of the numbers, and the time to them.

    Args:
        again: in two passes over the two halves of the prompt.
    """
    engine.prefixes.clear()
    segments = prompt_of(engine, question, texts)
    space = engine.primary.tokenize(f"{BEGINNING} 1").ids[-2:-1]
    if engine.primary.decode_ids(list(space)) == " ":
        segments[-1] = Fresh(f"{BEGINNING} ")
    found: Any = engine.prefill(segments, method=method, question=question)
    logits = found.logits
    if again:
        runtime: Any = engine.primary
        ids, half = found.layout.ids, len(found.layout.ids) // 2
        state, _ = runtime.prefill(ids[:half], len(ids) + 1)
        logits = runtime.extend(state, ids[half:], half)
    chosen = torch.tensor(numbers(engine, len(texts)))
    return logits.flatten().float().log_softmax(-1)[chosen].tolist(), found.stats.ttft_s


def answers(engine: CacheClipEngine, record: Record, methods: dict[str, Method]) -> dict[str, Any]:
    """Scores of the passages in every way, in the record's order."""
    chunks = record.chunks[:MOST]
    texts, full = [chunk.as_read.strip() for chunk in chunks], preset("full")
    mixed = random.Random(record.id).sample(range(len(texts)), len(texts))
    found: dict[str, Any] = {"full": scores(engine, record.question, texts, full)}
    found["again"] = scores(engine, record.question, texts, full, again=True)
    other, seconds = scores(engine, record.question, [texts[n] for n in mixed], full)
    found["reordered"] = [other[mixed.index(n)] for n in range(len(texts))], seconds
    for name, method in methods.items():
        engine.precompute(texts, method=method)
        found[name] = scores(engine, record.question, texts, method)
    engine.release(texts)
    right = [n for n in record.meta.get("gold_chunks", []) if n < len(texts)]
    return {"id": record.id, "right": right, "ways": found}


def table(items: Sequence[dict[str, Any]], ways: Sequence[str]) -> Iterator[str]:
    yield "way           tau   of reordered's      same first choice   rank of a right one   seconds   full's over it"
    taus = {way: [kendall(i["ways"]["full"][0], i["ways"][way][0]) for i in items] for way in ways}
    for way in ways:
        firsts = [_order(i["ways"]["full"][0])[0] == _order(i["ways"][way][0])[0] for i in items]
        ranks = [
            1 + min(_order(item["ways"][way][0]).index(n) for n in item["right"]) for item in items if item["right"]
        ]
        seconds = [i["ways"][way][1] for i in items]
        sooner = median(i["ways"]["full"][1] / i["ways"][way][1] for i in items)
        # tau may be negative: its distance from the opposite order has a ratio
        share = paired_ratio([1 + tau for tau in taus[way]], [1 + tau for tau in taus["reordered"]])
        compared = f"{share[0]:.2f} [{share[1]:.2f}, {share[2]:.2f}]" if share and way != "full" else ""
        yield (
            f"{way:12} {fmean(taus[way]):+.2f}   {compared:18}   {fmean(firsts):16.0%}"
            f"   {fmean(ranks) if ranks else float('nan'):19.2f}   {median(seconds):7.2f}   {sooner:13.1f}x"
        )


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda n: -values[n])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", required=True, help="files, comma-separated")
    parser.add_argument("--half", help="dev or test: every second question")
    parser.add_argument("--limit", type=int, default=60, help="most questions, spread over the files")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line; read again at start")
    parser.add_argument("--json", type=Path, help="also write the answers to this file")
    args = parser.parse_args()
    engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, dtype=args.dtype)
    methods = {"direct": preset("direct"), args.method: engine.make_method(args.method, args.ratio)}
    records = spread(args.dataset, half=args.half, limit=args.limit, least_chunks=3)
    items = ask_each(args.log, records, lambda record: answers(engine, record, methods))
    print(f"{len(items)} questions, {args.dtype}, ratio {args.ratio:g}, {processor_name()}")
    print("\n".join(table(items, ["full", "again", "reordered", *methods])))
    if args.json:
        args.json.write_text(json.dumps(items, indent=1))


if __name__ == "__main__":
    main()
