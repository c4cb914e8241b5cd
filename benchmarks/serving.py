"""A vLLM server that reuses chunks, under load: ``cacheclip serve --backend vllm``.

    python benchmarks/serving.py --json serving.json
    python benchmarks/serving.py --only equality --primary packaged:smollm2-135m --dtype float32 \
        --chunk-tokens 80 --chunks 4

Run it with the interpreter of an environment that has this package and vLLM. It stores chunks in a temporary folder,
starts the server, and asks it over HTTP. Methods take turns, so that a slow minute hits all of them.

``ttft``: seconds from sending a request to the first text of the answer, with the chunks in an order that no request
had before; plain prefill is asked of the same server (method ``full``). It exits with 1 if an answer is not fused.
``throughput``: answers a minute while requests arrive as a Poisson process, faster than they are answered, and a
bounded number of them runs at once. Prompts take random chunks in random order, so that vLLM's own prefix cache helps
where it can; plain prefill is asked of a vLLM without this package. ``turns``: seconds to the first text of each of
five turns of a chat, by ``full``, whose later turns vLLM's prefix cache serves, by the method, by ``epic``, whose
KV later turns continue, and by the method with ``finish="idle"`` and a pause before each later turn.

``equality``: this package's own engine (transformers) follows the server's greedy answers, and must choose the same
tokens, but where two are equally likely. It exits with 1 if it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from cacheclip_lab.timing.texts import QUESTION

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import processor_name

PARTS = ("ttft", "turns", "throughput", "equality")
FULL, IDLE = "full", "idle"
TURNS = (QUESTION, "And why is that?", "Who was it?", "When did it happen?", "Say it in one sentence.")
_OURS = "from cacheclip_rag.plugins import main; main()"
TIE = 1e-3
"""Tokens whose log-probabilities differ by less are equally likely: float32 rounds otherwise in other kernels."""
_START_S = 600.0
_TAIL_CHARACTERS = 3000
_SEQUENCES = 64
"""vLLM's ``max_num_seqs``: also the most runs of neighbouring tokens in one pass of a recompute."""


def main() -> None:
    args = parse()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheclip-serving-")))
        scene = Scene(args, folder, prepare(args, folder))
        found: dict[str, Any] = {
            "processor": processor_name(),
            "cores": psutil.cpu_count(logical=False),
            "settings": {name: value for name, value in vars(args).items() if name != "json"},
        }
        ours = stack.enter_context(server(args, folder, reusing=True))
        twin = stack.enter_context(server(args, folder, reusing=False)) if "throughput" in args.only else None
        for part in args.only:
            say(f"{part} …")
            found[part] = asyncio.run(MEASURES[part](scene, ours, twin))
            say(f"{part}: {json.dumps(found[part])}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, default=str))
    broken = [part for part in args.only if found[part].get("kept") is False]
    if broken:
        sys.exit(f"not kept: {', '.join(broken)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="ttft,throughput", help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", default="cacheclip")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--pool", type=int, default=24, help="stored chunks")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of a prompt")
    parser.add_argument("--chunk-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7, help="ttft: prompts")
    parser.add_argument("--running", type=int, default=8, help="throughput: most requests at once")
    parser.add_argument("--arrivals", type=float, default=2.0, help="throughput: requests a second")
    parser.add_argument("--answers", type=int, default=24, help="throughput: answers of each method, in two halves")
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=50, help="equality: prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="folder for the servers' logs; default a temporary one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.only = args.only.split(",")
    for part in args.only:
        if part not in PARTS:
            parser.error(f"expected names of parts ({', '.join(PARTS)}), got {part!r}")
    if "equality" in args.only and args.dtype != "float32":
        parser.error(f"expected --dtype float32 for equality, since others round too much, got {args.dtype}")
    if args.chunks > args.pool:
        parser.error(f"expected --pool of {args.chunks} or more, the chunks of a prompt, got {args.pool}")
    return args


# -- scene ------------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Texts that are stored, and the prompts that are made of them."""

    args: argparse.Namespace
    folder: Path
    texts: list[str]
    _orders: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.args.seed)

    def new_order(self) -> list[str]:
        """Chunks of a prompt, in an order that no prompt had before."""
        while True:
            order = tuple(self.rng.sample(range(len(self.texts)), self.args.chunks))
            if order not in self._orders:
                self._orders.add(order)
                return [self.texts[number] for number in order]

    def body(self, texts: Sequence[str], method: str | None = None, **more: Any) -> dict[str, Any]:
        """A chat request; ``method`` None is plain prefill."""
        asked = {"method": FULL} if method is None else {"method": method, "ratio": self.args.ratio}
        content = "\n\n".join([*texts, f"Question: {QUESTION}"])
        return {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": self.args.answer_tokens,
            "cacheclip": asked,
            **more,
        }


def prepare(args: argparse.Namespace, folder: Path) -> list[str]:
    """Store the chunks, in a process that ends and so gives its memory back. Returns their texts."""
    script = (
        "import json, sys\n"
        "from cacheclip_rag import CacheClipEngine\n"
        "from cacheclip_lab.timing.texts import make_texts\n"
        "given = json.loads(sys.argv[1])\n"
        "engine = CacheClipEngine(**given['engine'])\n"
        "texts = make_texts(engine.primary.tokenize, given['pool'], given['tokens'])\n"
        "engine.precompute(texts)\n"
        "engine.warm_up()\n"
        "print(json.dumps(texts))\n"
    )
    given = {
        "engine": engine_settings(args, folder),
        "pool": args.pool,
        "tokens": args.chunk_tokens,
    }
    say(f"storing {args.pool} chunks")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, json.dumps(given)], stdout=subprocess.PIPE, text=True, check=True
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


def engine_settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of an engine of ours with the server's models and store."""
    settings = {name: getattr(args, name) for name in ("primary", "auxiliary", "dtype", "method")}
    return {**settings, "store": str(folder / "store")}


# -- servers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A running server."""

    address: str
    process: subprocess.Popen[bytes]

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.address, timeout=httpx.Timeout(1800.0, connect=30.0))


@contextmanager
def server(args: argparse.Namespace, folder: Path, *, reusing: bool) -> Iterator[Server]:
    """Ours, or vLLM's alone."""
    from cacheclip_rag.models import resolve

    port = free_port()
    context = args.chunks * (args.chunk_tokens + 16) + args.answer_tokens + 256
    flags = ["--enforce-eager", "--max-model-len", str(context), "--max-num-seqs", str(max(_SEQUENCES, args.running))]
    if reusing:
        store = ["--store", str(folder / "store"), "--primary", args.primary, "--auxiliary", args.auxiliary]
        own = ["-c", _OURS, "serve", "--backend", "vllm", *store, "--dtype", args.dtype]
        command = [*own, "--method", args.method, "--port", str(port), "--", *flags]
    else:
        model = [str(resolve(args.primary)), "--dtype", args.dtype, "--host", "127.0.0.1"]
        flags.append("--enable-prompt-tokens-details")
        command = ["-m", "cacheclip_vllm.serve", "serve", *model, "--port", str(port), *flags]
    logs = args.log or folder
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{'ours' if reusing else 'plain'}.log"
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
    }
    say(f"starting {'the server' if reusing else 'a server without reuse'}")
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", *command], stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        started = Server(f"http://127.0.0.1:{port}", process)
        wait_ready(started, log)
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(started: Server, log: Path) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and started.process.poll() is None:
        try:
            if httpx.get(f"{started.address}/health").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-_TAIL_CHARACTERS:]}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# -- asking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """An answer that was streamed."""

    text: str
    ttft_s: float
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    outcome: str


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> Said:
    began, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    outcome = "none"
    async for event in events(client, body):
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            if piece and not first:
                first = time.perf_counter() - began
            text += piece
        usage = event.get("usage") or usage
        outcome = event.get("cacheclip", {}).get("outcome") or outcome
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return Said(text, first, time.perf_counter() - began, usage["prompt_tokens"], cached, outcome)


async def events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        if response.is_error:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:500]!r}")
        rest = b""
        async for piece in response.aiter_bytes():  # only a line feed ends a line: answers hold U+2028
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=body)
    if response.is_error:
        raise RuntimeError(f"status {response.status_code}: {response.content[:500]!r}")
    return dict(response.json())


async def until_idle(client: httpx.AsyncClient) -> None:
    """Wait until the server itself asks vLLM nothing any more."""
    answered, before = 0.0, -1.0
    while answered != before:
        await asyncio.sleep(1)
        lines = (await client.get("/metrics")).text.splitlines()
        counts = [line.rpartition(" ")[2] for line in lines if line.startswith("vllm:request_success_total")]
        before, answered = answered, sum(map(float, counts))


def without_field(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "cacheclip"}


# -- measures ---------------------------------------------------------------------------------------------------------


async def measure_ttft(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    args, found = scene.args, dict[str, list[Said]]()
    ways = {FULL: None, args.method: args.method}
    async with ours.client() as client:
        for way in ways.values():  # the first answer makes threads and buffers
            await streamed(client, scene.body(scene.new_order(), way, max_tokens=2))
        for number in range(args.rounds):
            texts = scene.new_order()
            for name, way in ways.items():
                # with a salt of its own: what plain prefill leaves in vLLM's cache would be taken instead of a plan
                body = scene.body(texts, way, max_tokens=2, cache_salt=f"{name} {number}")
                found.setdefault(name, []).append(await streamed(client, body))
    outcomes = Counter(said.outcome for said in found[args.method])
    medians = {name: statistics.median(said.ttft_s for said in each) for name, each in found.items()}
    return {
        "prompt_tokens": found[FULL][0].prompt_tokens,
        "ttft_s": {name: [said.ttft_s for said in each] for name, each in found.items()},
        "cached_tokens": {name: [said.cached_tokens for said in each] for name, each in found.items()},
        "outcomes": outcomes,
        "median_s": medians,
        "times_sooner": medians[FULL] / medians[args.method],
        "kept": set(outcomes) == {"fused"},
    }


async def measure_turns(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    args, found = scene.args, dict[str, list[list[Said]]]()
    async with ours.client() as client:
        for way in dict.fromkeys((FULL, args.method, "epic")):  # the first answer makes threads and buffers
            await streamed(client, scene.body(scene.new_order(), None if way == FULL else way, max_tokens=2))
        for _ in range(args.rounds):
            for way in dict.fromkeys((FULL, args.method, "epic", IDLE)):
                body = scene.body(scene.new_order(), {FULL: None, IDLE: args.method}.get(way, way), max_tokens=24)
                if way == IDLE:
                    body["cacheclip"]["finish"] = IDLE
                chat = []
                for question in TURNS:
                    if chat:
                        if way == IDLE:
                            await until_idle(client)
                        answer = {"role": "assistant", "content": chat[-1].text}
                        body["messages"] += [answer, {"role": "user", "content": question}]
                    chat.append(await streamed(client, body))
                found.setdefault(way, []).append(chat)
    turns = {way: list(zip(*chats, strict=True)) for way, chats in found.items()}
    return {
        "prompt_tokens": [turn[0].prompt_tokens for turn in turns[FULL]],
        "median_s": {way: [statistics.median(s.ttft_s for s in turn) for turn in each] for way, each in turns.items()},
        "cached_tokens": {way: [turn[0].cached_tokens for turn in each] for way, each in turns.items()},
        "outcomes": {way: [turn[0].outcome for turn in each] for way, each in turns.items()},
    }


async def measure_throughput(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    """``full`` is a vLLM without this package."""
    assert twin is not None
    args, half = scene.args, max(1, scene.args.answers // 2)
    seconds: dict[str, float] = {FULL: 0.0, args.method: 0.0}
    found: dict[str, list[Said]] = {FULL: [], args.method: []}
    async with ours.client() as client, twin.client() as plain:
        for name in (FULL, args.method, args.method, FULL):
            bodies = [scene.body(scene.new_order(), args.method) for _ in range(half)]
            if name == FULL:
                bodies = [without_field(body) for body in bodies]
            began = time.perf_counter()
            found[name] += await arriving(plain if name == FULL else client, bodies, args)
            seconds[name] += time.perf_counter() - began
    rates = {name: 60 * len(found[name]) / seconds[name] for name in found}
    return {
        "answers_a_minute": rates,
        "times_more": rates[args.method] / rates[FULL],
        "median_ttft_s": {name: statistics.median(said.ttft_s for said in each) for name, each in found.items()},
        "outcomes": Counter(said.outcome for said in found[args.method]),
        "cached_share_of_full": sum(said.cached_tokens for said in found[FULL])
        / sum(said.prompt_tokens for said in found[FULL]),
    }


async def arriving(client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], args: argparse.Namespace) -> list[Said]:
    """Ask as a Poisson process; ``ttft_s`` counts from the arrival, waiting included."""
    room, rng, running = asyncio.Semaphore(args.running), random.Random(args.seed), []

    async def one(body: dict[str, Any]) -> Said:
        arrived = time.perf_counter()
        async with room:
            waited = time.perf_counter() - arrived
            said = await streamed(client, body)
        return Said(**{**vars(said), "ttft_s": said.ttft_s + waited})

    for body in bodies:
        running.append(asyncio.create_task(one(body)))
        await asyncio.sleep(rng.expovariate(args.arrivals))
    return list(await asyncio.gather(*running))


async def measure_equality(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    args, seen, differences = scene.args, Counter[str](), list[dict[str, Any]]()
    bodies = [scene.body(scene.new_order(), args.method, return_token_ids=True) for _ in range(args.prompts)]
    async with ours.client() as client:
        answers = [await whole(client, body) for body in bodies]
    engine = CacheClipEngine(**engine_settings(args, scene.folder), recompute_ratio=args.ratio)
    for number, (body, answer) in enumerate(zip(bodies, answers, strict=True)):
        seen[str(answer["cacheclip"].get("outcome"))] += 1
        found = first_difference(engine, body["messages"], answer["choices"][0]["token_ids"])
        if found is not None:
            differences.append({"prompt": number, **found})
            say(f"different: {json.dumps(differences[-1])}")
    return {
        "prompts": args.prompts,
        "equal": args.prompts - len(differences),
        "outcomes": seen,
        "differences": differences,
        "kept": seen["fused"] == args.prompts and all(each["margin"] < TIE for each in differences),
    }


def first_difference(engine: CacheClipEngine, prompt: Any, ids: Sequence[int]) -> dict[str, Any] | None:
    """Where the engine would not have chosen an answer's next token; None if it chooses all of them.

    Returns:
        ``token`` (its number), the text of what was ``given`` and of what the engine has ``chosen``, and the ``margin``
        between their log-probabilities, in nats.
    """
    found = engine.prefill(prompt, SamplingParams(max_tokens=len(ids)), method=engine.make_method())
    logits = found.logits
    with torch.inference_mode():
        for number, given in enumerate(ids):
            chosen = int(logits.argmax())
            if chosen != given:
                texts = {"given": engine.primary.decode_ids([given]), "chosen": engine.primary.decode_ids([chosen])}
                return {"token": number, **texts, "margin": float(logits[chosen] - logits[given])}
            logits = engine.primary.decode_step(found.cache, given)
    return None


MEASURES = {
    "ttft": measure_ttft,
    "turns": measure_turns,
    "throughput": measure_throughput,
    "equality": measure_equality,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
