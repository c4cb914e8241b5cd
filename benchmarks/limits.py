"""What the engine costs beside plain transformers: decoding, ingestion, memory.

    python benchmarks/limits.py
    python benchmarks/limits.py --only decode,memory --primary packaged:qwen2.5-coder-0.5b --dtype bfloat16

``decode``: seconds per token after the first one, of a streamed answer with a stop string that never comes, against
transformers' ``generate``. ``ingest``: seconds to store texts that are cut already, for primary and auxiliary, against
the same tokens in batches through plain transformers, behind the same context, and against one pass per text without
any context. ``memory``: how much more memory one question takes at its peak, beyond what the process held after a short
question, against the KV of its prompt.

Ways take turns, so that a slow minute hits all of them; the ratios are of medians. Each row has a limit: the exit code
is 1 if a ratio misses it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cacheclip_lab.evaluation.bench import peak_rss_bytes, reset_peak_rss
from cacheclip_lab.timing.texts import QUESTION, make_texts

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import processor_name

PARTS = ("decode", "ingest", "memory")
NEVER = "\x00never"
"""A stop string that no answer has."""
DECODE_LIMIT, INGEST_LIMIT, CONTEXT_LIMIT = 1.03, 1 / 0.9, 2.2
KV_SHARE, KV_BYTES = 1.3, 200 * 10**6
"""A question may take this many times its prompt's KV, and so many bytes more."""


def main() -> None:
    import torch  # after cacheclip_rag, whose import shortens the time for which idle threads spin

    given = parse()
    if given.child:
        print(json.dumps(ask_in_child(given)))
        return
    found: dict[str, Any] = {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "primary": given.primary,
        "auxiliary": given.auxiliary,
        "dtype": given.dtype,
        "rows": [],
    }
    print(f"{found['processor']}, {found['threads']} threads; {given.primary} + {given.auxiliary}, {given.dtype}")
    print("| what | ours | plain | ratio | limit | |\n|---|---|---|---|---|---|", flush=True)
    measures = {"decode": measure_decode, "ingest": measure_ingest, "memory": measure_memory}
    for part in given.only:
        for row in measures[part](given):
            found["rows"].append(row)
            verdict = "ok" if row["ratio"] <= row["limit"] else "MISSED"
            cells = (row["what"], row["ours"], row["plain"], f"{row['ratio']:.3f}", f"{row['limit']:.3f}", verdict)
            print(f"| {' | '.join(cells)} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    sys.exit(any(row["ratio"] > row["limit"] for row in found["rows"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated; default all")
    parser.add_argument("--primary", default="packaged:smollm2-135m")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1000, help="decode: tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="decode: tokens of the answer")
    parser.add_argument("--chunks", type=int, default=16, help="ingest: number of texts")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="ingest: tokens of the longest text")
    parser.add_argument("--batch-tokens", type=int, default=1024, help="ingest: tokens of a batch of transformers'")
    parser.add_argument("--memory-tokens", default="2000,8000", help="memory: tokens of prompts, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.only = given.only.split(",")
    unknown = [part for part in given.only if part not in PARTS]
    if unknown or min(given.repeats, given.new_tokens - 1, given.chunks) < 1:
        parser.error(f"expected parts among {', '.join(PARTS)}, one repeat or more and two new tokens or more")
    return given


def settings(given: argparse.Namespace, **others: Any) -> dict[str, Any]:
    return {"primary": given.primary, "auxiliary": given.auxiliary, "dtype": given.dtype, **others}


def plain_model(runtime: Any, dtype: str) -> Any:
    """The same weights in transformers' own model with its own attention."""
    import torch
    from transformers import AutoModelForCausalLM

    from cacheclip_rag.models import resolve

    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(resolve(runtime.name), **options).eval()


def in_turns(ways: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of each way's seconds. One turn before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            gc.collect()
            taken = way()
            if turn:
                seconds[name].append(taken)
    return {name: statistics.median(found) for name, found in seconds.items()}


def row(what: str, ours: float, plain: float, limit: float, shown: Callable[[float], str]) -> dict[str, Any]:
    return {
        "what": what,
        "ours": shown(ours),
        "plain": shown(plain),
        "values": [ours, plain],
        "ratio": ours / plain,
        "limit": limit,
    }


# -- Decoding ----------------------------------------------------------------------------------------------------------


def measure_decode(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds per token after the first one."""
    import torch
    from transformers import DynamicCache
    from transformers.generation.streamers import BaseStreamer

    from cacheclip_rag.measuring import cache_argument

    engine = CacheClipEngine(**settings(given, prefix_cache_bytes=0))
    runtime: Any = engine.primary
    model = plain_model(runtime, given.dtype)
    model.generation_config.eos_token_id = None
    [text] = make_texts(runtime.tokenize, 1, given.prompt_tokens)
    count = given.new_tokens
    answers: dict[str, list[int]] = {}

    class Times(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())

        def end(self) -> None:
            pass

    def ours() -> float:
        started = time.perf_counter()
        *_, last = engine.stream(text, method="full", max_tokens=count, stop=(NEVER,))
        ended = time.perf_counter()
        answer = last.answer
        assert answer is not None and len(answer.token_ids) == count
        answers["ours"] = list(answer.token_ids)
        return (ended - started - answer.stats.ttft_s) / (count - 1)

    method = engine.make_method("full")
    ids = engine.prefill(text, method=method).layout.ids[None]

    def plain() -> float:
        times = Times()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                streamer=times,
                pad_token_id=0,
                **cache_argument(model, DynamicCache(config=model.config)),
            )
        answers["plain"] = found[0, ids.shape[1] :].tolist()
        return (times.seconds[-1] - times.seconds[1]) / (count - 1)  # the first entry is the prompt

    with patch.object(runtime, "eos_ids", frozenset()):  # of a model that others use too
        found = in_turns({"ours": ours, "plain": plain}, given.repeats)
    same = sum(a == b for a, b in zip(answers["ours"], answers["plain"], strict=True))
    what = f"decode, {ids.shape[1]} prompt tokens, {count} new ({same} equal)"
    yield row(what, found["ours"], found["plain"], DECODE_LIMIT, lambda s: f"{1 / s:.1f} tokens/s")


# -- Ingestion ---------------------------------------------------------------------------------------------------------


def measure_ingest(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds to compute and store the texts."""
    engine = CacheClipEngine(**settings(given))
    # primary and auxiliary; one of them if they are one model behind one context
    passes = {
        (each.runtime.name, each.num_prefix): each for each in engine.parts.models.chunk_caches(engine.context_of())
    }
    longest = given.chunk_tokens
    # lengths from half to the whole, as splitters make them
    lengths = [longest - (number * 7919) % (longest // 2) for number in range(given.chunks)]
    texts = [make_texts(engine.primary.tokenize, 1, n, seed=n + number)[0] for number, n in enumerate(lengths)]
    models = {caches.runtime.name: plain_model(caches.runtime, given.dtype) for caches in passes.values()}
    plain = [
        (models[each.runtime.name], [list(each.tokenize(text).ids) for text in texts], context_of(each))
        for each in passes.values()
    ]

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            fresh = CacheClipEngine(**settings(given, store=folder))
            fresh.precompute(["Something short, so that what is computed once is there."])
            started = time.perf_counter()
            stored = fresh.precompute(texts)
            taken = time.perf_counter() - started
            assert stored == len(texts)
            return taken

    def batched() -> float:
        started = time.perf_counter()
        for model, ids, context in plain:
            in_batches(model, ids, context, given.batch_tokens)
        return time.perf_counter() - started

    def alone() -> float:
        started = time.perf_counter()
        for model, ids, _ in plain:
            in_batches(model, ids, None, 1)
        return time.perf_counter() - started

    found = in_turns({"ours": ours, "batched": batched, "alone": alone}, given.repeats)
    tokens = sum(map(len, plain[0][1]))
    shown = f"{given.chunks} texts of {min(lengths)} to {longest} tokens through {len(plain)} models"

    def speed(seconds: float) -> str:
        return f"{tokens / seconds:.0f} tokens/s"

    yield row(f"ingest, {shown}, against batches", found["ours"], found["batched"], INGEST_LIMIT, speed)
    yield row(f"ingest, {shown}, against no context", found["ours"], found["alone"], CONTEXT_LIMIT, speed)


def context_of(caches: Any) -> list[tuple[Any, Any]] | None:
    """Keys (after RoPE) and values of the text before every chunk, per layer; None if there is none."""
    runtime, kv = caches.runtime, caches.prefix.kv
    if not kv.shape[3]:
        return None
    cache = runtime.new_cache(kv.shape[3])
    cache.fill(kv, slot=0, position=0)
    return [(layer.keys, layer.values) for layer in cache.layers]


def in_batches(
    model: Any, chunks: Sequence[Sequence[int]], context: Sequence[tuple[Any, Any]] | None, batch_tokens: int
) -> None:
    """Prefill chunks with transformers only: right-padded batches, sorted by length."""
    import torch
    from transformers import DynamicCache

    from cacheclip_rag.measuring import cache_argument

    before = 0 if context is None else context[0][0].shape[2]
    waiting = sorted(chunks, key=len)
    while waiting:
        size = max(1, batch_tokens // len(waiting[-1]))
        batch, waiting = waiting[-size:], waiting[:-size]
        width = len(batch[-1])
        ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in batch])
        mask = torch.tensor([[1] * (before + len(each)) + [0] * (width - len(each)) for each in batch])
        cache = DynamicCache(config=model.config)
        for number, (keys, values) in enumerate(context or ()):
            cache.update(keys.expand(len(batch), -1, -1, -1), values.expand(len(batch), -1, -1, -1), number)
        given: dict[str, Any] = {} if len(batch) == 1 else {"attention_mask": mask}
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache), **given)


# -- Memory ------------------------------------------------------------------------------------------------------------


def measure_memory(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Peak of one question, in a process that did nothing but answer a short one before."""
    engine_of = CacheClipEngine(**settings(given))
    for tokens in map(int, given.memory_tokens.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            engine = CacheClipEngine(**settings(given, store=folder))
            count = -(-tokens // 512)
            texts = make_texts(engine_of.primary.tokenize, count, (tokens - 64) // count, seed=tokens)
            short = make_texts(engine_of.primary.tokenize, 1, 64, seed=1)
            engine.precompute([*texts, *short])
            prompts = Path(folder) / "prompts.json"
            prompts.write_text(json.dumps([asked(short), asked(texts)]))
            names = [arg for name, value in settings(given).items() for arg in (f"--{name}", str(value))]
            command = [sys.executable, __file__, *names, "--child", folder]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        limit = KV_SHARE + KV_BYTES / found["kv"]
        what = f"memory, {found['prompt_tokens']} prompt tokens, {found['hits']} chunks reused"
        yield row(what, found["peak"], found["kv"], limit, lambda size: f"{size / 1e6:.0f} MB")


def asked(texts: Sequence[str]) -> str:
    return "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"


def ask_in_child(given: argparse.Namespace) -> dict[str, Any]:
    """Answer the short prompt, then the long one, whose peak counts."""
    short, long = json.loads((Path(given.child) / "prompts.json").read_text())
    engine = CacheClipEngine(**settings(given, store=given.child))
    engine.generate(short, max_tokens=1, question=QUESTION)
    gc.collect()
    reset_peak_rss()
    held = peak_rss_bytes()
    answer = engine.generate(long, max_tokens=1, question=QUESTION)
    runtime: Any = engine.primary
    of_token = 2 * runtime.num_layers * runtime.num_kv_heads * runtime.head_dim * runtime.dtype.itemsize
    return {
        "peak": peak_rss_bytes() - held,
        "kv": of_token * answer.stats.prompt_tokens,
        "prompt_tokens": answer.stats.prompt_tokens,
        "hits": answer.stats.hits,
    }


if __name__ == "__main__":
    main()
