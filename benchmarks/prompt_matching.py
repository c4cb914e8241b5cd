"""Prompt matching at scale, and never wrong: how long a search takes, what a stored text costs, and a fuzz run.

    python benchmarks/prompt_matching.py --texts 100000 --prompts 100000

Texts are made from a seed: half of them share a head longer than the anchors' region, as metadata headers do. The fuzz
run cuts prompts out of a few texts that overlap, contain each other and differ by a letter, spoils some of them
(truncated, whitespace joined anew, HTML escapes, case), and compares every result with a search that looks everywhere.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import statistics
import sys
import time
import tracemalloc

from cacheclip_rag.store import TextIndex

WORDS = ("harbour", "lamp", "of", "the", "stone", "built", "keeper", "in", "a", "year", "river", "and", "oil", "was")
HEAD = "file_path: /data/annual-report.pdf\npage_label: 7\nsection: results\n\n" * 5


def text(rng: random.Random, characters: int) -> str:
    found = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(characters // 8))
    return found[:characters].strip()


def scale(num_texts: int, characters: int, num_searches: int) -> dict[str, float]:
    rng = random.Random(0)
    index = TextIndex()
    kept = []
    for first in range(0, num_texts, 1000):
        batch = [
            (HEAD if number % 2 else "") + text(rng, rng.randrange(800, 1600))
            for number in range(first, min(first + 1000, num_texts))
        ]
        index.add(batch)
        kept += rng.sample(batch, min(5, len(batch)))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    started = time.perf_counter()
    index.find("x" * 100)  # reads all texts
    load_s = time.perf_counter() - started
    in_memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    seconds, found, placed = [], 0, 0
    for _ in range(num_searches):
        parts: list[str] = []
        while sum(map(len, parts)) < characters:
            parts.append(rng.choice([rng.choice(kept), text(rng, 900)]))
        prompt = "\n\n".join(parts[:-1])  # the last is one too many
        expected = [part for part in parts[:-1] if part in kept]
        started = time.perf_counter()
        matches = index.find(prompt)
        seconds.append(time.perf_counter() - started)
        assert [prompt[m.start : m.stop] for m in matches] == expected
        found, placed = found + len(matches), placed + len(expected)
    return {
        "texts": num_texts,
        "prompt_characters": characters,
        "load_s": round(load_s, 3),
        "bytes_per_text": round(in_memory / num_texts, 1),
        "search_ms_median": round(1000 * statistics.median(seconds), 2),
        "search_ms_max": round(1000 * max(seconds), 2),
        "found": found,
        "of": placed,
    }


def everywhere(prompt: str, texts: list[str]) -> list[str]:
    """Leftmost, longest, not overlapping, by looking at every place."""
    found, position = [], 0
    while position < len(prompt):
        here = max((t for t in texts if prompt.startswith(t, position)), key=len, default="")
        found += [here] if here else []
        position += max(1, len(here))
    return found


SPOILED = (
    lambda t, rng: t,
    lambda t, rng: t[: rng.randrange(1, len(t))],
    lambda t, rng: t[rng.randrange(1, len(t)) :],
    lambda t, rng: " ".join(t.split()),
    lambda t, rng: t.replace(" ", "\n"),
    lambda t, rng: html.escape(t),
    lambda t, rng: t.replace("a", "A", 1),
    lambda t, rng: f"  {t}\n",
)


def fuzz(num_prompts: int) -> dict[str, int]:
    rng = random.Random(1)
    matches = wrong = 0
    for number in range(num_prompts):
        if number % 500 == 0:  # other texts now and then
            long = text(rng, 600) + ' <b>"&"</b>  ' + text(rng, 200)
            pieces = [long[a:b].strip() for a, b in (sorted(rng.sample(range(len(long)), 2)) for _ in range(12))]
            texts = sorted({p for p in [long, *pieces, HEAD + pieces[0], HEAD + pieces[1]] if len(p) >= 16})
            index = TextIndex()
            index.add(texts)
        parts = [rng.choice(SPOILED)(rng.choice(texts), rng) for _ in range(rng.randrange(1, 5))]
        prompt = rng.choice(["", " ", "\n\n", "Context: "]).join(parts)
        found = [prompt[m.start : m.stop] for m in index.find(prompt)]
        matches += len(found)
        wrong += found != everywhere(prompt, texts)
    return {"prompts": num_prompts, "matches": matches, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=10_000)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=100_000)
    arguments = parser.parse_args()
    result = {
        "scale": scale(arguments.texts, arguments.characters, arguments.searches),
        "fuzz": fuzz(arguments.prompts),
    }
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["fuzz"]["wrong"] else 0)


if __name__ == "__main__":
    main()
