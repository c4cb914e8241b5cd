"""A vLLM server that reuses chunks, under load: ``cacheclip serve --backend vllm``.

    python benchmarks/serving.py --json serving.json
    python benchmarks/serving.py --only poisoning,failures --primary packaged:smollm2-135m --chunk-tokens 80 --chunks 4
    python benchmarks/serving.py --only soak --minutes 30
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

``steps``: seconds between the tokens of a running stream, while eight prompts arrive at once, each with chunks in an
order of its own: by ``full``, and by the method.

``poisoning``: plain requests among others that reuse the chunks of the same prompts get the bytes, log-probabilities
included, that a vLLM without this package gives. ``failures``: a third of the primary's payloads is damaged while a
request is answered. Where a load fails, the answer must be plain prefill's; where none does, it must be the answer of
the whole store, log-probabilities included both times. ``soak``: mixed requests, broken off streams and refused ones
for some time; the memory of all processes must stay. ``equality``: this package's own engine (transformers) follows
the server's greedy answers, and must choose the same tokens, but where two are equally likely. These four exit with 1
if the promise is not kept.
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from cacheclip_lab.timing.texts import QUESTION

from cacheclip_rag import CacheClipEngine, SamplingParams, StoreError
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.store import ChunkStore

PARTS = ("ttft", "turns", "steps", "throughput", "poisoning", "failures", "soak", "equality")
FULL, IDLE = "full", "idle"
TURNS = (QUESTION, "And why is that?", "Who was it?", "When did it happen?", "Say it in one sentence.")
PLAIN_TEXT = "Say in one sentence what a lighthouse is for."
_OURS = "from cacheclip_rag.plugins import main; main()"
_SHORT = {"logprobs": True, "top_logprobs": 2, "max_tokens": 8}
"""Answers that are compared byte by byte."""
_PROMPTS = 20
"""Prompts that recur in ``poisoning``: with reuse and without."""
_LOAD_FAILED = "its KV could not be read"
"""How the connector's reason begins."""
TIE = 1e-3
"""Tokens whose log-probabilities differ by less are equally likely: float32 rounds otherwise in other kernels."""
_STREAM_TOKENS, _ALONE = 400, 30
"""Tokens of a running stream, and those before others arrive."""
_EDGES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_START_S = 600.0
_TAIL_CHARACTERS = 3000
_SEQUENCES = 64
"""vLLM's ``max_num_seqs``: also the most runs of neighbouring tokens in one pass of a recompute."""


def main() -> None:
    args = parse()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cacheclip-serving-")))
        scene = Scene(args, folder, **prepare(args, folder))
        found: dict[str, Any] = {
            "processor": processor_name(),
            "cores": psutil.cpu_count(logical=False),
            "settings": {name: value for name, value in vars(args).items() if name != "json"},
        }
        ours = stack.enter_context(server(args, folder, reusing=True))
        twin = stack.enter_context(server(args, folder, reusing=False)) if needs_twin(args.only) else None
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
    parser.add_argument("--requests", type=int, default=1000, help="poisoning: requests")
    parser.add_argument("--failures", type=int, default=500, help="failures: failed loads")
    parser.add_argument("--minutes", type=float, default=30.0, help="soak: how long")
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


def needs_twin(parts: Sequence[str]) -> bool:
    return bool({"throughput", "poisoning", "failures"} & set(parts))


# -- scene ------------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Texts that are stored, and the prompts that are made of them."""

    args: argparse.Namespace
    folder: Path
    texts: list[str]
    payloads: list[Path]
    """The primary's, one for each text."""
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


def prepare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Store the chunks, in a process that ends and so gives its memory back. Returns their texts and payloads."""
    script = (
        "import json, sys\n"
        "from cacheclip_rag import CacheClipEngine\n"
        "from cacheclip_rag.methods import preset\n"
        "from cacheclip_lab.timing.texts import make_texts\n"
        "given = json.loads(sys.argv[1])\n"
        "engine = CacheClipEngine(**given['engine'])\n"
        "texts = make_texts(engine.primary.tokenize, given['pool'], given['tokens'])\n"
        "engine.precompute(texts)\n"
        "engine.warm_up()\n"
        "primary = engine.parts.kv_sources(preset(given['engine']['method'])).primary\n"
        "print(json.dumps({'texts': texts, 'keys': [primary.key(text) for text in texts]}))\n"
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
    found = json.loads(done.stdout.splitlines()[-1])
    payloads = [folder / "store" / "kv" / key[:2] / f"{key}.kv" for key in found["keys"]]
    return {"texts": found["texts"], "payloads": payloads}


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

    def memory_bytes(self) -> int:
        """Memory of all its processes; what they share counts once."""
        parent = psutil.Process(self.process.pid)
        return sum(int(one.memory_full_info().pss) for one in (parent, *parent.children(recursive=True)))

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


def choices_of(answer: dict[str, Any]) -> str:
    """What must be equal: text, reason and log-probabilities."""
    return json.dumps(answer["choices"], sort_keys=True)


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


async def measure_steps(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    args, found = scene.args, dict[str, Any]()
    async with ours.client() as client:
        for name in (FULL, args.method):
            way = None if name == FULL else name
            await streamed(client, scene.body(scene.new_order(), way, max_tokens=2))  # makes threads and buffers
            at, arrivals = list[float](), list[asyncio.Task[Said]]()
            stream = {**scene.body([], max_tokens=_STREAM_TOKENS), "cacheclip": {"method": FULL}}
            async for event in events(client, stream):
                if event.get("choices"):
                    at.append(time.perf_counter())
                if len(at) == _ALONE:
                    began = at[-1]
                    bodies = [scene.body(scene.new_order(), way, max_tokens=1) for _ in range(8)]
                    arrivals = [asyncio.create_task(streamed(client, body)) for body in bodies]
                if arrivals and all(task.done() for task in arrivals):
                    break
            said = await asyncio.gather(*arrivals)
            gaps = [after - before for before, after in zip(at, at[1:], strict=False)]
            beside = sorted(gap for gap, when in zip(gaps, at[1:], strict=True) if when > began)
            found[name] = {
                "alone_median_s": statistics.median(gaps[: _ALONE - 1]),
                "beside_s": {f"up to {edge}": sum(gap <= edge for gap in beside) for edge in _EDGES},
                "longest_s": beside[-1],
                "median_s": statistics.median(beside),
                "first_text_s": sorted(round(each.ttft_s, 3) for each in said),
                "outcomes": Counter(each.outcome for each in said),
            }
    return found


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


async def measure_poisoning(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    """One request after the other, so that both servers compute the same batches."""
    assert twin is not None
    args, seen = scene.args, Counter[str]()
    prompts = [scene.new_order() for _ in range(_PROMPTS)]
    fused, both = set[int](), set[int]()
    async with ours.client() as client, twin.client() as plain:
        for _ in range(args.requests):
            number = scene.rng.randrange(_PROMPTS)
            texts = prompts[number]
            if scene.rng.random() < 0.5:
                answer = await whole(client, scene.body(texts, args.method, **_SHORT))
                seen[str(answer["cacheclip"].get("outcome"))] += 1
                fused.add(number)
                continue
            both |= fused & {number}
            body = scene.body(texts, **_SHORT)
            if scene.rng.random() < 0.5:  # without a word about us, and without a stored text, which would be reused
                own = {"role": "user", "content": f"{PLAIN_TEXT} Answer number {number}."}
                body = {**without_field(body), "messages": [own]}
            answer, expected = await whole(client, body), await whole(plain, without_field(body))
            seen["equal" if choices_of(answer) == choices_of(expected) else "different"] += 1
    return {
        "requests": args.requests,
        "prompts": _PROMPTS,
        "prompts_fused_and_then_plain": len(both),
        "seen": seen,
        "kept": not seen["different"] and seen["fused"] > 0 and len(both) > 0,
    }


async def measure_failures(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    assert twin is not None
    args, seen, reasons, differing = scene.args, Counter[str](), Counter[str](), list[Any]()
    async with ours.client() as client, twin.client() as plain:
        for number in range(20 * args.failures):
            # with a salt of its own, so that none goes on from what earlier ones left in vLLM's cache: after exact KV
            # of the first chunk a fused answer is another one, and rounding is otherwise
            body = scene.body(scene.new_order(), args.method, **_SHORT, cache_salt=f"{number}")
            with damaged(scene.folder / "store", scene.payloads, scene.rng):
                answer = await whole(client, body)
                outcome, reason = (str(answer["cacheclip"].get(name)) for name in ("outcome", "reason"))
                if outcome == "plain":  # the server removes damaged chunks before it plans the next prompt
                    await whole(client, scene.body([], max_tokens=1))
            seen[outcome] += 1
            if outcome == "plain":
                reasons[reason[:80]] += 1
                expected = await whole(plain, without_field(body))
            else:
                expected = await whole(client, {**body, "cache_salt": f"again {number}"})
                seen["second " + str(expected["cacheclip"]["outcome"])] += 1
            is_equal = choices_of(answer) == choices_of(expected)
            seen["equal" if is_equal else "different"] += 1
            if not is_equal:
                differing.append([outcome, expected["cacheclip"] if outcome != "plain" else None, answer, expected])
            failed = sum(count for reason, count in reasons.items() if reason.startswith(_LOAD_FAILED))
            if failed >= args.failures:
                break
    return {
        "seen": seen,
        "reasons": reasons,
        "differing": differing[:20],
        "kept": not seen["different"] and failed >= args.failures,
    }


@contextmanager
def damaged(store: Path, payloads: Sequence[Path], rng: random.Random) -> Iterator[None]:
    """A third of the payloads is damaged, and then as before, with the entries of those that the server removed."""
    chosen = rng.sample(list(payloads), max(1, len(payloads) // 3))
    before = {path: path.read_bytes() for path in chosen}
    for path in chosen:
        rng.choice(DAMAGES)(path, rng)
    try:
        yield
    finally:
        for path, content in before.items():
            path.write_bytes(content)
        found = ChunkStore.open(store)
        for path in chosen:
            enter(found, path.stem)
        found.close()


def enter(store: ChunkStore, key: str) -> None:
    """Enter a payload into the catalog, which the server may be writing to."""
    for _ in range(100):
        try:
            return store.catalog.correct(key, store.measure)
        except StoreError:
            time.sleep(0.05)
    raise RuntimeError(f"the catalog of {store} stays locked")


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip, cut, remove)


async def measure_soak(scene: Scene, ours: Server, twin: Server | None) -> dict[str, Any]:
    args, seen, memory = scene.args, Counter[str](), list[tuple[float, int]]()
    began = time.monotonic()
    end = began + 60 * args.minutes

    async def asking(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(args.seed + number)
        while time.monotonic() < end:
            texts = rng.sample(scene.texts, args.chunks)
            draw = rng.random()
            if draw < 0.1:
                response = await client.post("/v1/chat/completions", json={**scene.body(texts), "cacheclip": {"no": 1}})
                seen[f"refused with {response.status_code}"] += 1
            elif draw < 0.25:
                async for event in events(client, scene.body(texts, args.method)):
                    if event["choices"] and event["choices"][0]["delta"].get("content"):
                        break
                seen["broken off"] += 1
            else:
                said = await streamed(client, scene.body(texts, args.method if draw < 0.75 else None))
                seen[said.outcome if draw < 0.75 else FULL] += 1
                seen["empty"] += not said.text

    async def watching() -> None:
        while time.monotonic() < end:
            memory.append((time.monotonic() - began, ours.memory_bytes()))
            await asyncio.sleep(5)

    async with ours.client() as client:
        await asyncio.gather(watching(), *(asking(client, number) for number in range(min(4, args.running))))
    # caches fill at first, so growth is looked for in the second half
    late = [value for at, value in memory if at > 30 * args.minutes]
    growth = statistics.fmean(late[-len(late) // 5 :]) / statistics.fmean(late[: len(late) // 5 + 1]) - 1
    bad = [name for name in seen if name.startswith("refused") and not name.endswith("400")]
    return {
        "minutes": args.minutes,
        "seen": seen,
        "memory_bytes": memory[:: max(1, len(memory) // 60)],
        "growth_of_the_second_half": growth,
        "kept": growth < 0.02 and not bad and not seen["empty"],
    }


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
    "steps": measure_steps,
    "throughput": measure_throughput,
    "poisoning": measure_poisoning,
    "failures": measure_failures,
    "soak": measure_soak,
    "equality": measure_equality,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
