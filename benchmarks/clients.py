"""Many clients of one server: how long their first tokens take, and how many tokens it answers with.

    python benchmarks/clients.py
    python benchmarks/clients.py --primary packaged:qwen2.5-coder-0.5b.gguf --clients 8
    python benchmarks/clients.py --primary packaged:qwen2.5-coder-0.5b --auxiliary packaged:smollm2-135m --clients 8
    python benchmarks/clients.py --primary packaged:smollm2-135m --method prefix --beside
    python benchmarks/clients.py --primary packaged:smollm2-135m --new 40

Starts ``cacheclip serve`` in a process of its own and asks it over HTTP: as many questions as there are clients, first
one after the other, then all at once. Every question has stored chunks in an order of its own, so that no prefix cache
helps. Prints the first-token times of those that ask at once, counted from when they ask, and tokens a second of whole
answers both times. With ``--beside``: the first token of one question alone, and of one that comes after four titles of
chats, after an answer with a crafted ``stop``, and after another question. With ``--new``: so many prompts in which
nothing recurs, each asked of this server and of one with ``learn = "off"`` and ``moved = "off"``, by turns: the median
of the paired ratios of first tokens, and the memory that each server held at most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cacheclip_lab.timing.texts import QUESTION, make_texts

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import processor_name

_START_S = 300.0
_TITLE = "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
OTHERS: dict[str, list[dict[str, str]]] = {
    "alone": [],
    "four titles": [{"task": _TITLE}] * 4,
    "a stop string of 1,000 characters": [{"stop": "The " * 250}],
    "another question": [{}],
}
"""Requests beside the question."""


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="cacheclip-clients-") as folder:
        store = Path(folder) / "store"
        engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, store=store, dtype=args.dtype)
        texts = make_texts(engine.primary.tokenize, args.chunks, args.tokens // args.chunks)
        engine.precompute(texts, method=args.method)
        engine.close()
        with serving(args, store) as server:
            if args.new:
                plain = Path(folder) / "plain.toml"
                plain.write_text('moved = "off"\n[serve]\nlearn = "off"\n')
                with serving(args, Path(folder) / "other", plain) as other:
                    rows = asyncio.run(new_texts(args, server, other))
            else:
                rows = asyncio.run((beside if args.beside else measure)(args, texts, server.address))
    found = {"processor": processor_name(), "settings": vars(args), "rows": rows}
    if args.json or args.beside or args.new:
        print(json.dumps(found, indent=2))
        return
    form = "llama.cpp" if args.primary.endswith(".gguf") else args.dtype
    print(f"{found['processor']}; {args.primary} in {form}, {args.tokens} tokens of chunks, {args.max_tokens} new")
    print(f"{'clients':>7} {'first token, median':>20} {'last':>8} {'tokens/s':>9} {'in turn':>8} {'times':>6}")
    for row in rows:
        first, rate, alone = row["first_s"], row["tokens_per_s"], row["tokens_per_s_in_turn"]
        median, last = statistics.median(first), max(first)
        print(f"{row['clients']:7} {median:18.2f} s {last:6.2f} s {rate:9.1f} {alone:8.1f} {rate / alone:5.2f}x")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:smollm2-135m")
    parser.add_argument("--auxiliary", help="default: the primary, or packaged:smollm2-135m beside a GGUF file")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--clients", default="1,4,8,16", help="comma-separated")
    parser.add_argument("--tokens", type=int, default=1300, help="of the chunks of a prompt")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--beside", action="store_true", help="one question beside other requests")
    parser.add_argument("--new", type=int, default=0, help="prompts in which nothing recurs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.auxiliary = args.auxiliary or ("packaged:smollm2-135m" if args.primary.endswith(".gguf") else args.primary)
    args.clients = [int(number) for number in args.clients.split(",")]
    return args


class Server(NamedTuple):
    """A server process."""

    address: str
    pid: int

    @property
    def most_bytes(self) -> int:
        """Memory that it held at most (Linux)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextmanager
def serving(args: argparse.Namespace, store: Path, settings: Path | None = None) -> Iterator[Server]:
    command = [sys.executable, "-P", "-c", "import cacheclip_rag.cli as cli; cli.main()", "serve", "--json"]
    models = {"primary": args.primary, "auxiliary": args.auxiliary, "dtype": args.dtype, "method": args.method}
    for name, value in {**models, "store": str(store), "port": "0"}.items():
        command += [f"--{name}", value]
    command += ["--settings", str(settings)] if settings else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            assert process.stdout is not None
            if not (line := process.stdout.readline()):
                raise SystemExit(f"the server ended before it could be asked. See why: {shlex.join(command)}")
            yield Server(str(json.loads(line)["address"]), process.pid)
        finally:
            process.terminate()


async def measure(args: argparse.Namespace, texts: list[str], address: str) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        await ask(client, args, rng.sample(texts, len(texts)))  # makes threads and buffers
        for count in args.clients:
            prompts = [rng.sample(texts, len(texts)) for _ in range(2 * count)]
            began = time.perf_counter()
            alone = [await ask(client, args, each) for each in prompts[:count]]
            alone_s = time.perf_counter() - began
            began = time.perf_counter()
            together = await asyncio.gather(*(ask(client, args, each) for each in prompts[count:]))
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "clients": count,
                    "first_s": sorted(first for first, _ in together),
                    "first_s_in_turn": sorted(first for first, _ in alone),
                    "tokens_per_s": sum(tokens for _, tokens in together) / seconds,
                    "tokens_per_s_in_turn": sum(tokens for _, tokens in alone) / alone_s,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


async def beside(args: argparse.Namespace, texts: list[str], address: str) -> list[dict[str, Any]]:
    """Each case three times, by turns: seconds to the first token of a question that comes after the others."""
    rng, seconds = random.Random(0), {case: list[float]() for case in OTHERS}
    async with httpx.AsyncClient(base_url=address, timeout=None) as client:
        await ask(client, args, rng.sample(texts, len(texts)))
        for _ in range(3):
            for case, others in OTHERS.items():
                asked = [asyncio.create_task(ask(client, args, rng.sample(texts, len(texts)), **how)) for how in others]
                await asyncio.sleep(0.2 if asked else 0)
                seconds[case].append((await ask(client, args, rng.sample(texts, len(texts))))[0])
                await asyncio.gather(*asked)
            print(json.dumps(seconds), file=sys.stderr, flush=True)
    alone = statistics.median(seconds["alone"])
    return [
        {"beside": case, "first_s": each, "times": statistics.median(each) / alone} for case, each in seconds.items()
    ]


async def new_texts(args: argparse.Namespace, learning: Server, plain: Server) -> list[dict[str, Any]]:
    """Seconds to the first token of each prompt, from both servers, which take turns in being first."""
    rng, seconds, memory = random.Random(0), list[dict[Server, float]](), list[int]()
    async with httpx.AsyncClient(timeout=None) as client:
        for number in range(-2, args.new):  # the first two make threads and buffers
            text = " ".join(str(rng.randrange(10**6)) for _ in range(args.tokens // 7))
            asked: dict[Server, float] = {}
            for server in (learning, plain)[:: 1 if number % 2 else -1]:
                asked[server] = (await ask(client, args, [text], address=server.address))[0]
            if number >= 0:
                seconds.append(asked)
                memory.append(learning.most_bytes)
    later = statistics.median(each[learning] / each[plain] for each in seconds) - 1
    half = memory[len(memory) // 2 :]
    return [
        {
            "prompts": len(seconds),
            "first_s": statistics.median(each[learning] for each in seconds),
            "later_than_plain": later,
            "most_bytes": learning.most_bytes,
            "of_them_in_the_second_half": half[-1] - half[0],
            "most_bytes_of_plain": plain.most_bytes,
        }
    ]


async def ask(
    client: httpx.AsyncClient,
    args: argparse.Namespace,
    texts: list[str],
    task: str = "",
    stop: str | None = None,
    address: str = "",
) -> tuple[float, int]:
    """Seconds to the first text of an answer, and its tokens."""
    content = task + "\n\n".join(texts) + f"\n\nQuestion: {QUESTION}"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": args.max_tokens,
        "temperature": 1.0,
    }
    body |= {"seed": 1, "stream": True, "stream_options": {"include_usage": True}, "cacheclip": {"method": args.method}}
    body |= {"stop": stop} if stop else {}
    began, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{address}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if not first and any(choice["delta"].get("content") for choice in event["choices"]):
                first = time.perf_counter() - began
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return first or time.perf_counter() - began, tokens


if __name__ == "__main__":
    main()
