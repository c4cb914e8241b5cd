"""llama.cpp with stored chunks beside plain llama.cpp, on the same GGUF file, in one process.

    python benchmarks/gguf.py DATASET.jsonl.gz
    python benchmarks/gguf.py DATASET.jsonl.gz --primary model.gguf --tokens 1000,4000 --rounds 5 --json gguf.json
    python benchmarks/gguf.py DATASET.jsonl.gz --exact --primary one.gguf,another.gguf

Two tables. *Closeness*, over the dataset's first questions: KL of the first token to full prefill, and answers that are
its own word for word. ``full again`` is the floor: llama.cpp rounds otherwise where cells of its cache lie elsewhere.
*Time*, on chunks of the dataset up to so many tokens: seconds to the first token and to the whole answer. Methods take
turns in every round, each round on other chunks; the figures are medians, and medians of a round's ratio to ``full``.

``--exact`` has one table: ratio 1.0 beside full prefill, in one call and in spans of 32 tokens, over each question's
first three chunks. Where greedy answers part, ``tie`` is the largest distance of the two tokens' logits there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from cacheclip_lab.evaluation.records import read_records

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.methods import Method

QUESTION = "Describe in three sentences what these passages are about."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b.gguf")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--tokens", default="1000,4000", help="lengths of prompts for the times")
    parser.add_argument("--new", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=20, help="questions for closeness; 0: none")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--exact", action="store_true", help="exactness at ratio 1.0, of several primaries")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.exact:
        found = []
        for name in args.primary.split(","):
            found += exactness(name, args)
            print_table(found[-3:])
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
        return
    engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, prefix_cache_bytes=0)
    records = read_records(args.dataset).records
    found = {"closeness": closeness(engine, records[: args.limit], args.ratio), "times": []}
    print_table(found["closeness"])
    for tokens in map(int, args.tokens.split(",")):
        found["times"] += times(engine, records, tokens, args)
    print_table(found["times"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def methods_of(engine: CacheClipEngine, ratio: float) -> dict[str, Method]:
    return {
        "full": engine.make_method("full"),
        "direct": engine.make_method("direct"),
        f"epic {ratio}": engine.make_method("epic", ratio),
        f"cacheclip {ratio}": engine.make_method("cacheclip", ratio),
    }


def closeness(engine: CacheClipEngine, records: Any, ratio: float) -> list[dict[str, Any]]:
    others = {"full again": engine.make_method("full"), "ratio 1.0": engine.make_method("epic", 1.0)}
    others |= {name: method for name, method in methods_of(engine, ratio).items() if name != "full"}
    seen: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for record in records:
        chunks = [f"{chunk.title}\n{chunk.text}" for chunk in record.chunks]
        engine.precompute(chunks)
        prompt = "\n\n".join([*chunks, f"Answer in a few words. Question: {record.question}"])
        expected, text = answered(engine, prompt, engine.make_method("full"))
        for name, method in others.items():
            logits, own = answered(engine, prompt, method)
            seen[name].append((divergence(expected, logits), own == text))
    return [
        {
            "method": name,
            "questions": len(pairs),
            "kl": statistics.fmean(kl for kl, _ in pairs),
            "kl_max": max(kl for kl, _ in pairs),
            "same_answer": statistics.fmean(same for _, same in pairs),
        }
        for name, pairs in seen.items()
    ]


def answered(engine: CacheClipEngine, prompt: str, method: Method) -> tuple[torch.Tensor, str]:
    logits = engine.prefill(prompt, method=method).logits
    return logits, engine.generate(prompt, SamplingParams(max_tokens=24), method=method).text


def exactness(primary: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    engine = CacheClipEngine(primary=primary, auxiliary=None, method="epic", prefix_cache_bytes=0)
    runtime: Any = engine.primary
    full, everything = engine.make_method("full"), engine.make_method("epic", 1.0)
    ways = {"full again": (full, 0), "ratio 1.0": (everything, 0), "ratio 1.0 in spans": (everything, 32)}
    seen: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for record in read_records(args.dataset).records[: args.limit]:
        chunks = [f"{chunk.title}\n{chunk.text}" for chunk in record.chunks[:3]]
        engine.precompute(chunks)
        prompt = "\n\n".join([*chunks, f"Answer in a few words. Question: {record.question}"])
        expected = greedy(engine, prompt, full)
        for way, (method, size) in ways.items():
            with in_spans(runtime, size) if size else nullcontext():
                found = greedy(engine, prompt, method)
            pairs = zip(expected, found, strict=True)
            parted = next(((a, b) for a, b in pairs if a.argmax() != b.argmax()), None)
            tie = None if parted is None else float(parted[0].max() - parted[0][parted[1].argmax()])
            seen[way].append((divergence(expected[0], found[0]), tie))
    return [
        {
            "primary": primary,
            "method": way,
            "prompts": len(pairs),
            "kl": statistics.fmean(kl for kl, _ in pairs),
            "kl_max": max(kl for kl, _ in pairs),
            "same_answer": statistics.fmean(tie is None for _, tie in pairs),
            "tie": max((tie for _, tie in pairs if tie is not None), default=0.0),
        }
        for way, pairs in seen.items()
    ]


def greedy(engine: CacheClipEngine, prompt: str, method: Method, count: int = 16) -> list[torch.Tensor]:
    """The logits of an answer's tokens."""
    prefilled = engine.prefill(prompt, method=method)
    found = [prefilled.logits]
    while len(found) < count:
        found.append(engine.primary.decode_step(prefilled.cache, int(found[-1].argmax())))
    return found


@contextmanager
def in_spans(runtime: Any, size: int) -> Iterator[None]:
    """Let llama.cpp compute so many tokens of a prompt in each call."""
    whole, spare = runtime.compute_in_order, runtime._context.spare

    def cut(ids: Any, held: Any, runs: Any, capacity: int, **options: Any) -> Any:
        spans = [(at, min(at + size, stop)) for start, stop in runs for at in range(start, stop, size)]
        return whole(ids, held, spans, capacity, **options)

    runtime.compute_in_order, runtime._context.spare = cut, lambda: 0
    try:
        yield
    finally:
        runtime.compute_in_order, runtime._context.spare = whole, spare


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    p, q = one.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def times(engine: CacheClipEngine, records: Any, tokens: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    texts = iter([f"{chunk.title}\n{chunk.text}" for record in records[args.limit :] for chunk in record.chunks])
    methods, params = methods_of(engine, args.ratio), SamplingParams(max_tokens=args.new, temperature=0.0)
    first: dict[str, list[float]] = defaultdict(list)
    whole: dict[str, list[float]] = defaultdict(list)
    lengths = []
    for number in range(args.rounds):
        chunks, length = list[str](), 0
        for text in islice(texts, 1000):
            chunks.append(text)
            length += len(engine.primary.tokenize(text))
            if length >= tokens:
                break
        engine.precompute(chunks)
        prompt = "\n\n".join([*chunks, QUESTION])
        order = [*methods][number % len(methods) :] + [*methods][: number % len(methods)]
        for name in order:
            stats = engine.generate(prompt, params, method=methods[name]).stats
            first[name].append(stats.ttft_s)
            # an answer that ends sooner would be no comparison
            whole[name].append(stats.ttft_s + stats.decode_s * args.new / max(1, stats.generated_tokens))
            lengths.append(stats.prompt_tokens)
    return [
        {
            "method": name,
            "prompt_tokens": round(statistics.fmean(lengths)),
            "first_token_s": statistics.median(first[name]),
            "sooner": statistics.median(a / b for a, b in zip(first["full"], first[name], strict=True)),
            f"answer_of_{args.new}_s": statistics.median(whole[name]),
            "answer_sooner": statistics.median(a / b for a, b in zip(whole["full"], whole[name], strict=True)),
        }
        for name in methods
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print("\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        figures = [f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.values()]
        print("| " + " | ".join(figures) + " |", flush=True)


if __name__ == "__main__":
    main()
