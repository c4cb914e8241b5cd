"""Several questions on the same documents: does continued KV answer the later ones as well as fresh fusion, and sooner?

    python benchmarks/follow_ups.py --dataset xquad_en.jsonl.gz,2wikimqa.jsonl.gz --limit 50 --turns 3 --log FILE

Questions of a data set that have the same chunks make one conversation; where none have, the chunks of ``--turns``
neighbouring records are put together, and each record asks its question. Every question is answered in five ways:

    full       ordinary prefill, nothing kept
    prefix     ordinary prefill after the exact KV of the questions before
    fresh      the method, nothing kept
    continued  the method after its own KV of the questions before
    idle       the same with finish="idle": after each answer the reader takes a while, and nothing else is asked

Prints per turn gold F1, contained answers, equal answers and first tokens (with full's) and times to the first token.
Conversations in the log are not asked again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cacheclip_lab.evaluation.questions import ask
from cacheclip_lab.evaluation.records import Record, read_records
from cacheclip_lab.evaluation.scores import METRICS
from cacheclip_lab.evaluation.statistics import paired_ratio
from resumed import ask_each

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.methods import preset

INSTRUCTION = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
WAYS = ("full", "prefix", "fresh", "continued", "idle")


def conversations(records: Sequence[Record], turns: int) -> Iterator[list[Record]]:
    """Records that ask about the same chunks, ``turns`` at a time."""
    shared: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        shared.setdefault(tuple(chunk.as_read for chunk in record.chunks), []).append(record)
    if max(map(len, shared.values())) >= turns:
        for group in shared.values():
            yield from (group[at : at + turns] for at in range(0, len(group) - turns + 1, turns))
        return
    for at in range(0, len(records) - turns + 1, turns):
        group = list(records[at : at + turns])
        chunks = tuple(dict.fromkeys(itertools.chain.from_iterable(record.chunks for record in group)))
        yield [replace(record, chunks=chunks) for record in group]


def answers(engine: CacheClipEngine, records: Sequence[Record], method: Any) -> dict[str, list[dict[str, Any]]]:
    """Every question's answer in every way."""
    asked = [ask(engine, record) for record in records]
    engine.precompute(asked[0].chunks)
    methods = {"full": preset("full"), "prefix": preset("prefix"), "fresh": method, "continued": method, "idle": method}
    found: dict[str, list[dict[str, Any]]] = {}
    for way in WAYS:
        engine.prefixes.clear()
        found[way] = []
        for each in asked:
            if way in ("full", "fresh"):
                engine.prefixes.clear()
            question, params = each.record.question, SamplingParams(max_tokens=each.max_tokens)
            finish = "idle" if way == "idle" else "none"
            answer = engine.generate(each.segments, params, method=methods[way], question=question, finish=finish)
            engine.wait_for_observers(600.0)
            found[way].append(
                {
                    "text": answer.text,
                    "first": answer.token_ids[0],
                    "f1": METRICS["f1"](each.judged(answer.text), each.record.answers),
                    "contains": METRICS["contains"](each.judged(answer.text), each.record.answers),
                    "ttft_s": answer.stats.ttft_s,
                    "continued": answer.stats.continued_tokens,
                    "computed": answer.stats.fresh_tokens + answer.stats.recomputed_tokens,
                    "tokens": answer.stats.prompt_tokens,
                }
            )
    engine.release(asked[0].chunks)
    return found


def table(items: Sequence[dict[str, list[dict[str, Any]]]], turns: int) -> Iterator[str]:
    """One line a turn and way."""
    yield "turn  way        F1     contains  equal  first token  computed  first token after  of prefix's"
    for turn in range(turns):
        full = [item["full"][turn] for item in items]
        exact = statistics.median(item["prefix"][turn]["ttft_s"] for item in items)
        for way in WAYS:
            rows = [item[way][turn] for item in items]
            mean = {key: statistics.fmean(row[key] for row in rows) for key in ("f1", "contains", "computed")}
            equal = statistics.fmean(row["text"] == other["text"] for row, other in zip(rows, full, strict=True))
            first = statistics.fmean(row["first"] == other["first"] for row, other in zip(rows, full, strict=True))
            seconds = statistics.median(row["ttft_s"] for row in rows)
            yield (
                f"{turn + 1:4}  {way:9}  {mean['f1']:.3f}  {mean['contains']:7.0%}  {equal:6.0%}  {first:10.0%}"
                f"  {mean['computed']:8.0f}  {seconds:15.2f} s  {seconds / exact:11.2f}"
            )
    for way, score in itertools.product(("continued", "idle"), ("f1", "contains")):
        later = [(item[way][turn], item["fresh"][turn]) for item in items for turn in range(1, turns)]
        own, fresh = ([row[score] for row in rows] for rows in zip(*later, strict=True))
        yield f"{score} of {way} over fresh, later turns, with its 95 % interval: {paired_ratio(own, fresh)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dataset", required=True, help="files, comma-separated")
    parser.add_argument("--limit", type=int, default=50, help="most conversations of each file")
    parser.add_argument("--turns", type=int, default=3, help="questions of one conversation")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--log", type=Path, required=True, help="one JSON object a line; read again at start")
    args = parser.parse_args()
    models = {"primary": args.primary, "auxiliary": args.auxiliary, "dtype": args.dtype}
    engine = CacheClipEngine(**models, system_prompt=INSTRUCTION, prefix_cache_bytes=2**30)
    method = engine.make_method(args.method, args.ratio)
    planned: dict[str, list[Record]] = {}
    for path in args.dataset.split(","):
        read = read_records(path)
        of_file = itertools.islice(conversations(read.records, args.turns), args.limit)
        planned |= {f"{read.name} {group[0].id}": group for group in of_file}

    def asked(name: str) -> dict[str, Any]:
        return {"id": name, "ways": answers(engine, planned[name], method)}

    items = ask_each(args.log, {name: name for name in planned}, asked, "conversations")
    print(f"{len(planned)} conversations of {args.turns} questions, {args.dtype}, {processor_name()}")
    print("\n".join(table([item["ways"] for item in items], args.turns)))


if __name__ == "__main__":
    main()
