"""Negative controls: what must gain nothing, and must not be counted as a success.

    python benchmarks/negative.py --primary packaged:qwen2.5-coder-0.5b --auxiliary packaged:smollm2-135m

    nothing shared   prompts of random words: nothing is found, moved or learned, and they take plain prefill's time
    hi               the same greeting again and again: nothing is found or learned; of a prefix cache's tokens, no more
                     than the greeting's and the chat template's
    doctor           what cacheclip doctor says of these requests: nothing recurs, nothing moves

As in ``cacheclip serve``, the engine learns texts that recur, and is idle between prompts. Seconds are beside those of
an engine that reuses nothing (``method="full"``), asked right before. Exit code 1 if a control fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cacheclip_lab.doctor.report import Diagnosis
from cacheclip_lab.doctor.requests import RequestLog
from cacheclip_lab.doctor.reuse import measured
from cacheclip_lab.evaluation.statistics import paired_ratio
from cacheclip_serve import LearnedTexts

from cacheclip_rag import CacheClipEngine, SamplingParams

ANSWER = SamplingParams(max_tokens=1)
SLOWER = 1.1
"""Most times plain prefill's time that a prompt may take of which nothing can be reused, unless its interval reaches
below."""


def random_words(number: int, count: int) -> str:
    """A prompt that shares no three words with any other."""
    letters = random.Random(number)
    return " ".join("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(count))


def asked(engine: CacheClipEngine, prompts: Sequence[str]) -> dict[str, Any]:
    """What the engine reused of prompts that come one after the other."""
    stats, plain = [], []
    for prompt in prompts:
        plain.append(engine.prefill(prompt, ANSWER, method="full").stats.ttft_s)
        stats.append(engine.generate(prompt, ANSWER).stats)
        assert engine.wait_for_observers(600), "still learning"
    ratio = paired_ratio([each.ttft_s for each in stats], plain)
    assert ratio is not None, "prefill takes time"
    return {
        "prompts": len(prompts),
        "prompt_tokens": sum(each.prompt_tokens for each in stats),
        "hits": sum(each.hits for each in stats),
        "moved_tokens": sum(each.moved_tokens for each in stats),
        "most_cached_tokens": max(each.cached_prefix_tokens for each in stats),
        "learned_texts": engine.metrics.snapshot().get("learned_texts_total", 0),
        "outcomes": sorted({each.method for each in stats}),
        "over_plain": [*ratio],
    }


def diagnosed(prompts: Sequence[str]) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        log = Path(folder) / "requests.jsonl"
        bodies = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
        log.write_text("".join(json.dumps(body) + "\n" for body in bodies))
        return Diagnosis.of([*measured([*RequestLog([log]).prompts()])]).shares


def broken(found: dict[str, Any], template: int) -> list[str]:
    """The controls that fail."""
    cold, hi, said = found["nothing shared"], found["hi"], found["doctor"]
    low = cold["over_plain"][1] or 0.0
    checks = {
        "a prompt that shares nothing found KV": cold["hits"] or cold["moved_tokens"],
        "it took more of earlier prompts than the chat template": cold["most_cached_tokens"] > template,
        "it was slower than plain prefill": low > SLOWER,
        "a text was learned": cold["learned_texts"] or hi["learned_texts"],
        "a greeting found KV": hi["hits"] or hi["moved_tokens"],
        "the doctor sees reuse in what shares nothing": said["nothing shared"]["new"] < 0.9,
        "the doctor sees more than a prefix in greetings": said["hi"]["moved"] or said["hi"]["recurring"],
    }
    return [name for name, fails in checks.items() if fails]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--words", type=int, default=150, help="in a prompt that shares nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cold, hi = [random_words(number, args.words) for number in range(args.prompts)], ["hi"] * args.prompts
    found: dict[str, Any] = {"doctor": {"nothing shared": diagnosed(cold), "hi": diagnosed(hi)}}
    for name, prompts in (("nothing shared", cold), ("hi", hi)):
        engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, dtype=args.dtype)
        engine.observers.append(LearnedTexts(engine, quiet_s=0.0))
        engine.warm_up()
        found[name] = asked(engine, prompts)
        template = engine.plan(".", method="full").layout.num_tokens
        engine.close()
    failing = broken(found, template)
    print(json.dumps({**found, "broken": failing}, indent=1))
    if args.json:
        args.json.write_text(json.dumps({**found, "broken": failing}))
    sys.exit(1 if failing else 0)


if __name__ == "__main__":
    main()
