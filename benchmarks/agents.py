"""Sessions of a coding agent, asked again: what is served from KV of earlier prompts, how much sooner, and as well?

    python -m pip download --no-deps agentic-swarm-bench && unzip agentic_swarm_bench-*.whl
    python benchmarks/agents.py --sessions 'agentic_swarm_bench/scenarios/data/cpp-*/*.jsonl'
    python benchmarks/agents.py --sessions '…/cpp-build-firefox.jsonl' --ask 8 --cut 3000 --log FILE
    git clone https://github.com/SWE-agent/SWE-agent
    python benchmarks/agents.py --sessions 'SWE-agent/trajectories/demonstrations/**/*.traj'

Reads recorded requests, one JSON object with ``messages`` a line; and trajectories of SWE-agent. Without ``--ask`` no
prompt is computed: the whole requests are looked up in the cache of earlier prompts, which then keeps their places.
Prints the share of their tokens that each way serves:

    prefix       exact prefix caching
    shifted      what ``--cache-reuse 256`` of llama.cpp's server takes of the request before, by the rule in its code
    moved        the cache of this package: exact beginnings, and equal tokens at other places

With ``--ask`` the first requests of each session are answered, their messages cut to ``--cut`` characters, by plain
prefill (``full``), by prefix caching alone and with moved KV; ``moved, idle`` has time between two requests to complete
the exact KV, as while tools run. Prints the share that is not computed, the time to the first token over plain
prefill's, and the answers: equal to plain prefill's, and valid calls of the session's tools. Requests in the log are
not asked again.
"""

from __future__ import annotations

import argparse
import glob
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resumed import ask_each

from cacheclip_rag import CacheClipEngine, PromptTooLongError, SamplingParams
from cacheclip_rag.measuring import known_kv, processor_name
from cacheclip_rag.runtime import KVSource

ANSWER = SamplingParams(max_tokens=48)
SHIFTED_RUN = 256
"""Least tokens of a run that llama.cpp's server is asked to shift."""
WHOLE_OUTPUTS = 5
"""Outputs of tools that SWE-agent does not shorten."""
Messages = list[dict[str, Any]]
WAYS = {
    "full": {"method": "full"},
    "prefix": {"method": "prefix"},
    "moved": {},
    "moved, idle": {"finish": "idle"},
}


def session(path: Path) -> list[Messages]:
    """The messages of each request: roles and texts, and calls of tools as text."""
    if path.suffix == ".traj":
        requests = of_trajectory(json.loads(path.read_text(encoding="utf-8"))["history"])
    else:
        requests = (json.loads(line)["messages"] for line in path.open(encoding="utf-8"))
    return [[message(each) for each in messages] for messages in requests]


def of_trajectory(history: Messages) -> Iterator[Messages]:
    """The requests of a trajectory of SWE-agent, by its ``last_n_observations``, as in its paper (arXiv:2405.15793):
    of the tools' outputs, the last five are whole."""
    for number, answer in enumerate(history):
        if answer["role"] != "assistant" or answer.get("is_demo"):
            continue
        before = [*history[:number]]
        outputs = [at for at, each in enumerate(before) if each["role"] in ("user", "tool") and not each.get("is_demo")]
        for at in outputs[1:-WHOLE_OUTPUTS]:
            lines = len(message(before[at])["content"].splitlines())
            before[at] = {**before[at], "content": f"Old environment output: ({lines} lines omitted)"}
        yield before


def message(recorded: dict[str, Any]) -> dict[str, Any]:
    content = recorded["content"] or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text") or json.dumps(part) for part in content)
    calls = [call["function"] for call in recorded.get("tool_calls") or ()]
    content += "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    if recorded["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": recorded["role"], "content": content}


class NoKV:
    """Stands for the KV of tokens whose places alone count."""

    def __init__(self, num_tokens: int, token_bytes: int) -> None:
        self.num_tokens, self.token_bytes = num_tokens, token_bytes

    def get_seq_length(self) -> int:
        return self.num_tokens

    def blocks(self, start: int, stop: int, size: int) -> Iterable[Any]:
        return [range(first, min(first + size, stop)) for first in range(start, stop, size)]

    def write_blocks(self, part: Any) -> None:
        raise AssertionError("no prompt is computed")


def shifted(before: Sequence[int], now: Sequence[int]) -> int:
    """Tokens that ``--cache-reuse`` takes of the prompt before: its beginning, then runs in order."""
    same = next((at for at, (left, right) in enumerate(zip(before, now, strict=False)) if left != right), None)
    total = at_now = at_before = min(len(before), len(now)) if same is None else same
    while at_before < len(before) and at_now < len(now):
        run = 0
        while (
            at_before + run < len(before) and at_now + run < len(now) and before[at_before + run] == now[at_now + run]
        ):
            run += 1
        if run >= SHIFTED_RUN:
            total, at_before, at_now = total + run, at_before + run, at_now + run
        else:
            at_before += 1
    return total


def shares(engine: CacheClipEngine, requests: Iterable[Messages]) -> dict[str, int]:
    """Tokens of all requests, and how many each way serves."""
    counts = dict.fromkeys(("requests", "tokens", "prefix", "shifted", "moved"), 0)
    engine.prefixes.clear()
    before: Sequence[int] = ()
    for messages in requests:
        try:
            plan = engine.plan(messages)
        except PromptTooLongError:
            continue
        ids = plan.layout.token_ids
        with engine.parts.kv_sources(plan.method).match(plan.method, plan.layout, continued=True, moves=True) as match:
            known = known_kv(plan.layout, (), match.runs)
        counts["requests"] += 1
        counts["tokens"] += len(ids)
        counts["prefix"] += engine.prefixes.known(ids[:-1])
        counts["shifted"] += shifted(before, ids)
        counts["moved"] += len(ids) - known.count(KVSource.COMPUTED)
        engine.prefixes.insert(ids, NoKV(len(ids), engine.primary.new_cache(16).token_bytes))
        before = ids
    return counts


def valid_call(text: str, tools: set[str]) -> bool:
    """Whether an answer begins a call of a known tool that can be read."""
    _, _, call = text.partition("<tool_call>")
    try:
        return json.JSONDecoder().raw_decode(call.strip())[0]["name"] in tools
    except (ValueError, KeyError, TypeError):
        return False


def asked(engines: dict[str, CacheClipEngine], messages: Messages, tools: set[str]) -> dict[str, Any]:
    """One request, each way."""
    found: dict[str, Any] = {}
    for way, engine in engines.items():
        answer = engine.generate(messages, ANSWER, **WAYS[way])
        engine.wait_for_observers(3600)
        stats = answer.stats
        found[way] = {
            "text": answer.text,
            "tokens": stats.prompt_tokens,
            "reused": stats.reused_tokens,
            "ttft": stats.ttft_s,
            "call": valid_call(answer.text, tools),
        }
    return found


def table(items: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "way            not computed   first token (last quarter)   same answer   valid calls"
    for way in WAYS:
        rows = [item["ways"][way] for item in items]
        plain = [item["ways"]["full"] for item in items]
        share = sum(row["reused"] for row in rows) / sum(row["tokens"] for row in rows)
        ratios = [row["ttft"] / each["ttft"] for row, each in zip(rows, plain, strict=True)]
        same = statistics.fmean(row["text"] == each["text"] for row, each in zip(rows, plain, strict=True))
        calls = sum(row["call"] for row in rows)
        last = statistics.median(ratios[-max(1, len(ratios) // 4) :])
        yield f"{way:12} {share:14.0%} {statistics.median(ratios):13.2f} ({last:.2f}) {same:20.0%} {calls:13}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sessions", required=True, help="files of recorded requests; * is allowed")
    parser.add_argument("--ask", type=int, help="answer so many requests of each session")
    parser.add_argument("--cut", type=int, default=3000, help="characters of a message; with --ask")
    parser.add_argument("--cache-gib", type=float, default=4.0, help="limit of KV of earlier prompts")
    parser.add_argument("--log", type=Path, help="one JSON object a line; read again at start; with --ask")
    args = parser.parse_args()
    paths = [Path(name) for name in sorted(glob.glob(args.sessions, recursive=True))]
    engines = {
        way: CacheClipEngine(
            primary=args.primary,
            auxiliary=None,
            dtype=args.dtype,
            on_miss="ignore",
            min_confidence=0.0,
            namespace=f"way{number}",
            prefix_cache_bytes=int(args.cache_gib * 2**30),
        )
        for number, way in enumerate(WAYS)
    }
    if not args.ask:
        print("requests (too long)      tokens  prefix  shifted   moved   session")
        for path in paths:
            whole = session(path)
            counts = shares(engines["moved"], whole)
            parts = "  ".join(f"{counts[name] / counts['tokens']:6.1%}" for name in ("prefix", "shifted", "moved"))
            left_out = len(whole) - counts["requests"]
            print(
                f"{counts['requests']:8} {left_out:10} {counts['tokens']:10,}  {parts}   {path.parent.name}/{path.stem}"
            )
        return
    if args.log is None:
        parser.error("--ask needs --log FILE")
    requests, tools = dict[str, Messages](), set[str]()
    for path in paths:
        whole = session(path)
        for number, messages in enumerate(whole[: args.ask]):
            requests[f"{path.parent.name}/{path.stem}/{number}"] = [
                {**each, "content": each["content"][: args.cut]} for each in messages
            ]
    for messages in requests.values():
        for each in messages:
            for part in each["content"].split("<tool_call>")[1:]:
                try:
                    tools.add(json.loads(part.partition("</tool_call>")[0])["name"])
                except (ValueError, KeyError):
                    continue
    items = ask_each(
        args.log,
        {name: name for name in requests},
        lambda name: {"id": name, "ways": asked(engines, requests[name], tools)},
        "requests",
    )
    print(f"{len(items)} requests, {args.primary}, {args.dtype}, {processor_name()}")
    print("\n".join(table(items)))


if __name__ == "__main__":
    main()
