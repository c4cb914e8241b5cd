"""Attacks on ``cacheclip serve``: hostile requests from one client, and the answers that another client gets meanwhile.

    python benchmarks/server_attack.py --json found.json        # every attack; attacker and client are two tenants
    python benchmarks/server_attack.py flood "half a head"      # these only
    python benchmarks/server_attack.py --same                   # attacker and client are one tenant, as without keys

A server process with a tiny model, a process that attacks it over many connections, and a client that asks a short
question again and again, whole and streamed in turn, as fast as it gets answers. Prints a table: the client's
questions and answers, seconds, and what the attacker was answered. Exit code 1 if the client lacks an answer, or waited
for one longer than ``--limit`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from cacheclip_testing import tiny

KEYS = {"attacker": "key-of-the-attacker", "client": "key-of-the-client"}
CONTEXT = 8192
"""Tokens of the model."""
CHAT = "/v1/chat/completions"


def chat(*messages: Any, **fields: Any) -> bytes:
    asked = messages or ("What?",)
    texts = [{"role": "user", "content": each} if isinstance(each, str) else each for each in asked]
    return json.dumps({"messages": texts, "max_tokens": 4, **fields}).encode()


def tool(number: int, parameters: Any = None) -> dict[str, Any]:
    function = {"name": f"f{number}", "description": f"No. {number}", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


def schema(value: Any) -> bytes:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": value}})


def documents(count: int, text: str) -> dict[str, Any]:
    return {"documents": [text.replace("{}", str(n)) for n in range(count)]}


ALIKE = "The keepers of the lighthouse wrote into their book what they saw."
LOOP = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

BODIES: dict[str, Callable[[], bytes]] = {
    "messages": lambda: chat(*[""] * 200_000),
    "documents": lambda: chat(
        *["x " * 40] * 300, cacheclip={"documents": [f"Document {n} of all" for n in range(10_000)]}
    ),
    "large documents": lambda: chat(
        *["x " * 40] * 30, cacheclip={"documents": [f"{n} words " * 400 for n in range(1500)]}
    ),
    "alike": lambda: chat(*[f"{ALIKE} {n}" for n in range(200)], cacheclip=documents(2000, ALIKE + " No. {}")),
    "most messages": lambda: chat(*["a"] * 2000),
    "most documents": lambda: chat(*[f"{ALIKE} {n}" for n in range(60)], cacheclip=documents(4000, "{} of {} " * 10)),
    "most tools": lambda: chat(tools=[tool(n) for n in range(1000)]),
    "most calls": lambda: chat(*[{"role": "assistant", "content": "", "tool_calls": [CALL] * 4}] * 300),
    "text": lambda: chat("The harbour master counts ships. " * 240_000),
    "spaces": lambda: chat(" " * 7_900_000),
    "one letter": lambda: chat("a" * 7_900_000),
    "fitting text": lambda: chat("The lighthouse was built in 1847. " * 400),
    "escapes": lambda: b'{"messages":[{"role":"user","content":"' + rb"\u0041" * 1_300_000 + b'"}]}',
    "parts": lambda: chat({"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}),
    "tools": lambda: chat(tools=[tool(n) for n in range(60_000)]),
    "keys of a tool": lambda: chat(
        tools=[tool(1, {"type": "object", "properties": {f"k{n}": {} for n in range(90_000)}})]
    ),
    "deep tool": lambda: chat(tools=[tool(1, nested(400))]),
    "calls": lambda: chat(*[{"role": "assistant", "content": "", "tool_calls": [CALL] * 40}] * 1000),
    "lists": lambda: b'{"messages":[{"role":"user","content":"a"}],"metadata":[' + b"[]," * 2_600_000 + b"1]}",
    "deep lists": lambda: b'{"messages":[{"role":"user","content":"a"}],"metadata":' + b"[" * 900 + b"]" * 900 + b"}",
    "very deep lists": lambda: b'{"messages":' + b"[" * 2_000_000,
    "stop": lambda: chat(stop=[f"stop {n}" for n in range(300_000)], max_tokens=4000),
    "integer": lambda: chat(max_tokens=10**300),
    "number in a tool": lambda: chat(tools=[tool(1, {"type": "object", "properties": {"a": {"const": 10**3000}}})]),
    "infinite": lambda: b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    "reference loop": lambda: schema(LOOP),
    "deep schema": lambda: schema(nested(400)),
    "large schema": lambda: schema({"enum": [f"value {n}" for n in range(60_000)]}),
    "pattern": lambda: schema({"type": "string", "pattern": "((a{1,1000}){1,1000}b?){1,1000}"}),
    "long answers": lambda: chat("Tell me all.", max_tokens=2000, temperature=2, seed=1),
}


async def ask(
    address: tuple[str, int], body: bytes, *, key: str, path: str = CHAT, leaves_after: float = 0, of_body: float = 1.0
) -> str:
    """Send one request over its own connection; returns its status, or what happened. ``of_body``: share of the body
    that is sent before the sender leaves."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json"
        )
        sent = body[: int(of_body * len(body))]
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + sent)
        if leaves_after:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(writer.drain(), leaves_after)
            await asyncio.sleep(leaves_after)
            return "left"
        await writer.drain()
        line = await reader.readline()
        await reader.read()
        return line.split()[1].decode() if line else "closed"
    finally:
        writer.close()


async def many(
    address: tuple[str, int], body: bytes, key: str, tally: Counter[str], connections: int, **how: Any
) -> None:
    async def one() -> None:
        while True:
            try:
                tally[await ask(address, body, key=key, **how)] += 1
            except OSError as error:
                tally[type(error).__name__] += 1
                await asyncio.sleep(0.05)

    await asyncio.gather(*[one() for _ in range(connections)])


async def half_open(address: tuple[str, int], key: str, tally: Counter[str], text: bytes, more: bytes = b"a") -> None:
    """900 connections that send the beginning of a request, then a little now and then."""

    async def one() -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(text.replace(b"KEY", key.encode()))
                tally["opened"] += 1
                while not reader.at_eof():
                    with suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(reader.read(1000), 1)
                    writer.write(more.replace(b"KEY", key.encode()))
                    await writer.drain()
                tally["closed"] += 1
                writer.close()
            except OSError:
                tally["closed"] += 1
                await asyncio.sleep(0.2)

    await asyncio.gather(*[one() for _ in range(900)])


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = b"authorization: Bearer KEY\r\ncontent-type: application/json\r\n"
OTHERS: dict[str, Callable[..., Any]] = {
    "flood": lambda *a: many(a[0], BODIES["long answers"](), a[1], a[2], 90),
    "flood of streams": lambda *a: many(a[0], chat("All.", max_tokens=500, stream=True), a[1], a[2], 90),
    "who leaves": lambda *a: many(a[0], BODIES["fitting text"](), a[1], a[2], 30, leaves_after=0.3),
    "who leaves large": lambda *a: many(a[0], BODIES["documents"](), a[1], a[2], 30, leaves_after=0.3),
    "who leaves a body": lambda *a: many(a[0], BODIES["text"](), a[1], a[2], 30, leaves_after=0.1, of_body=0.5),
    "who leaves a stream": lambda *a: many(
        a[0], chat("All.", max_tokens=2000, stream=True), a[1], a[2], 30, leaves_after=0.3
    ),
    "wrong key": lambda *a: many(a[0], BODIES["text"](), "no-such-key", a[2], 20),
    "nothing sent": lambda *a: half_open(*a, b"", b""),
    "answered and kept": lambda *a: half_open(*a, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b""),
    "half a head": lambda *a: half_open(*a, HEAD + b"x-y: "),
    "headers without end": lambda *a: half_open(*a, HEAD, b"x-y: z\r\n"),
    "half a body": lambda *a: half_open(*a, HEAD + WHOLE + b"content-length: 8000000\r\n\r\n{"),
    "chunks without end": lambda *a: half_open(
        *a, HEAD + WHOLE + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"1\r\n \r\n"
    ),
    "requests in a row": lambda *a: half_open(*a, b"", 20 * (HEAD + WHOLE + b"content-length: 2\r\n\r\n{}")),
    "completion": lambda *a: many(
        a[0], json.dumps({"prompt": "a b " * 1_900_000}).encode(), a[1], a[2], 8, path="/v1/completions"
    ),
}
ATTACKS = [*BODIES, *OTHERS]


async def attack(name: str, address: tuple[str, int], key: str, seconds: float) -> Counter[str]:
    tally: Counter[str] = Counter()
    going = OTHERS[name](address, key, tally) if name in OTHERS else many(address, BODIES[name](), key, tally, 8)
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(going, seconds)
    return tally


@contextmanager
def server(folder: Path, model: Path, *, with_keys: bool) -> Iterator[tuple[subprocess.Popen[str], str]]:
    options = [
        "--primary",
        str(model),
        "--auxiliary",
        str(model),
        "--method",
        "epic-corrected",
        "--port",
        "0",
        "--json",
    ]
    options += ["--store", str(folder / "store")]
    if with_keys:
        (folder / "tenants.json").write_text(json.dumps({key: name for name, key in KEYS.items()}))
        options += ["--tenants", str(folder / "tenants.json")]
    command = [str(Path(sys.executable).parent / "cacheclip"), "serve", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (folder / "log").read_text()
            yield process, json.loads(line)["address"]
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def peak_mb(process: subprocess.Popen[str]) -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


def client(address: str, key: str, seconds: float, limit: float) -> tuple[list[float], Counter[str]]:
    """Ask until the time is over; the seconds of every answer, and what went wrong."""
    taken: list[float] = []
    wrong: Counter[str] = Counter()
    end = time.monotonic() + seconds
    with httpx.Client(base_url=address, headers={"authorization": f"Bearer {key}"}, timeout=4 * limit) as http:
        number = 0
        while time.monotonic() < end:
            body = {"messages": [{"role": "user", "content": "How old is it?"}], "max_tokens": 4}
            began = time.monotonic()
            number += 1
            try:
                response = http.post(CHAT, json={**body, "stream": number % 2 == 0})
                if response.status_code == 200:
                    taken.append(time.monotonic() - began)
                else:
                    wrong[str(response.status_code)] += 1
            except httpx.HTTPError as error:
                wrong[type(error).__name__] += 1
            time.sleep(0.02)
    return taken, wrong


HEADS = ("attack", "", "asked", "answers", "median s", "longest s", "quiet s", "MB")


def row(
    name: str, quiet: list[float], taken: list[float], wrong: Counter[str], peak: int, attacker: dict[str, int]
) -> dict[str, Any]:
    """What one attack came to. ``quiet``, ``taken``: seconds of the client's answers before it and during it."""
    return {
        "attack": name,
        "asked": len(taken) + sum(wrong.values()),
        "answers": len(taken),
        "median_s": statistics.median(taken) if taken else None,
        "longest_s": max(taken, default=None),
        "quiet_s": statistics.median(quiet) if quiet else None,
        "peak_mb": peak,
        "wrong": dict(wrong),
        "attacker": attacker,
        "answers_s": [round(each, 4) for each in taken],
    }


def is_bad(found: dict[str, Any], limit: float) -> bool:
    return not found["answers"] or bool(found["wrong"]) or found["longest_s"] > limit


def line(found: dict[str, Any], limit: float) -> str:
    seconds = (found[f"{name}_s"] for name in ("median", "longest", "quiet"))
    cells = ["FAILED" if is_bad(found, limit) else "ok", found["asked"], found["answers"]]
    cells += ["-" if each is None else f"{each:.3f}" for each in seconds]
    columns = "".join(f"{cell:>10}" for cell in [*cells, found["peak_mb"]])
    return f"{found['attack']:20}{columns}  {found['wrong']}; {found['attacker']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"default all: {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--limit", type=float, default=5.0, help="most seconds of an answer to the client")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what the table has there, with all seconds")
    parser.add_argument("--same", action="store_true", help="attacker and client are one tenant")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        name, host, port, key = args.attack
        print(json.dumps(asyncio.run(attack(name, (host, int(port)), key, args.seconds))))
        return
    if unknown := set(args.attacks) - set(ATTACKS):
        parser.error(f"no attack is called {', '.join(sorted(unknown))}. Known: {', '.join(ATTACKS)}")
    rows: list[dict[str, Any]] = []
    print(f"{HEADS[0]:20}", *(f"{head:>10}" for head in HEADS[1:]), "  wrong; what the attacker was answered", sep="")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        spec = {**tiny.TINY_MODELS["llama"], "max_position_embeddings": CONTEXT}
        model = tiny.build_model(folder / "tiny", spec, context=CONTEXT)
        template = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + tiny.CHAT_TEMPLATE
        (model / "chat_template.jinja").write_text(template)
        for name in args.attacks or ATTACKS:
            with server(folder, model, with_keys=not args.same) as (process, address):
                quiet, _ = client(address, KEYS["client"], 1.0, args.limit)
                host, port = address.removeprefix("http://").split(":")
                command = [sys.executable, __file__, "--seconds", str(args.seconds), "--attack", name, host, port]
                attacker = subprocess.Popen([*command, KEYS["attacker"]], stdout=subprocess.PIPE, text=True)
                time.sleep(1.5)  # until it has made its body
                taken, wrong = client(address, KEYS["client"], args.seconds, args.limit)
                said, _ = attacker.communicate()
                peak = peak_mb(process)
            rows.append(row(name, quiet, taken, wrong, peak, json.loads(said or "{}")))
            print(line(rows[-1], args.limit), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"limit_s": args.limit, "seconds": args.seconds, "attacks": rows}, indent=1))
    failed = [each["attack"] for each in rows if is_bad(each, args.limit)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
