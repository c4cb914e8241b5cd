"""What a load costs a worker of vLLM, without vLLM: processor seconds and seconds to read 8,000 tokens' stored KV of an
8B model (8 KV heads of 128), to check it, and to write it into a paged cache in host memory.

    python -m tests.runtime.load_costs

Some layers are measured, and the table is for 32. ``read``: files to checked payloads in memory, on the loader's
threads, beside vLLM's steps. ``write``: payloads to the paged cache, rotated, which a step waits for. Medians. Payloads
are in the system's page cache. ``--ranks 8``: one of eight tensor-parallel workers. ``--device cuda``: caches there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from cacheclip_rag.base.machine import processor_name
from cacheclip_rag.fusion.wire import FusionPlan, StoredPiece
from cacheclip_rag.store import ChunkStore, TenantStore
from cacheclip_rag.vllm.loading import Loader
from cacheclip_rag.vllm.parameters import Settings
from cacheclip_rag.vllm.scheduling import Load

HEADS, WIDTH, BLOCK, LAYERS = 8, 128, 16, 32


class Writer:
    """Writes keys and values by slot, as vLLM's backends do."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        kv_cache[0].index_copy_(0, slot_mapping, key)
        kv_cache[1].index_copy_(0, slot_mapping, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--chunk-tokens", type=int, default=400)
    parser.add_argument("--layers", type=int, default=8, help="measured ones")
    parser.add_argument("--codecs", default="bfloat16,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{processor_name()}, {psutil.cpu_count(logical=False)} cores; {args.tokens} tokens, {LAYERS} layers")
    for codec in args.codecs.split(","):
        with tempfile.TemporaryDirectory(prefix="cacheclip-loads-") as folder:
            found = measure(args, codec, Path(folder))
        print(json.dumps({"codec": codec, **found}))


def measure(args: argparse.Namespace, codec: str, folder: Path) -> dict[str, Any]:
    count = args.tokens // args.chunk_tokens
    keys = [f"{number:064x}" for number in range(count)]
    store = ChunkStore.open(folder)
    for key in keys:
        kv = torch.randn(args.layers, 2, HEADS, args.chunk_tokens, WIDTH).bfloat16()
        TenantStore(store, "default").put(key, kv, codec)
    store.close()
    tokens = count * args.chunk_tokens
    pieces = tuple(StoredPiece(n * args.chunk_tokens, key, 0, args.chunk_tokens) for n, key in enumerate(keys))
    plan = FusionPlan(tuple(range(tokens + 1)), pieces, (), codec=codec)
    cache = {"size": (2, tokens + BLOCK, HEADS // args.ranks, WIDTH), "dtype": torch.bfloat16, "device": args.device}
    torch.distributed.all_reduce = lambda *_, **__: None  # the others have read as much
    loader = Loader(
        {number: SimpleNamespace(impl=Writer(), kv_cache=torch.zeros(**cache)) for number in range(args.layers)},
        Settings(folder),
        runtime(args.layers),  # type: ignore[arg-type]
        lambda: None,  # type: ignore[arg-type, return-value]
        SimpleNamespace(rank_in_group=0, world_size=args.ranks, cpu_group=None),
        block_size=BLOCK,
        max_runs=64,
        max_rows=tokens,
    )
    blocks = tuple(range(tokens // BLOCK + 1))
    times: dict[str, list[float]] = {"read_cpu_s": [], "read_s": [], "write_cpu_s": [], "write_s": []}
    for _ in range(args.rounds):
        before = psutil.Process().io_counters().read_chars
        began, cpu = time.perf_counter(), time.process_time()
        loader.load(Load("a", blocks, 0, tokens, plan=plan))
        wait((loader._queue[0].entries or {}).values())
        half, half_cpu = time.perf_counter(), time.process_time()
        ((_, done),) = loader.work(tokens, waits=True)
        assert not isinstance(done, Exception), done
        if args.device != "cpu":
            torch.cuda.synchronize()
        times["read_s"].append(half - began), times["read_cpu_s"].append(half_cpu - cpu)
        times["write_s"].append(time.perf_counter() - half), times["write_cpu_s"].append(time.process_time() - half_cpu)
    read = (psutil.Process().io_counters().read_chars - before) / args.layers * LAYERS
    loader.close()
    stored = sum(path.stat().st_size for path in folder.glob("kv/*/*.kv")) / args.layers * LAYERS
    scaled = {name: round(statistics.median(each) / args.layers * LAYERS, 3) for name, each in times.items()}
    return {"stored_mb": round(stored / 1e6), "read_mb": round(read / 1e6), **scaled}


def runtime(layers: int) -> SimpleNamespace:
    """What a loader asks of a model."""

    def tables(positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        angles = positions[:, None].float() * 500_000 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        both = torch.cat([angles, angles], dim=1)
        return [(both.cos(), both.sin())] * layers

    shape = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "dtype": torch.bfloat16}
    return SimpleNamespace(**shape, rotary_tables=tables)


if __name__ == "__main__":
    main()
