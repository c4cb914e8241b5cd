"""Prompt matching at scale, with hostile input, and never wrong: how long a search takes, and a fuzz run.

    python benchmarks/prompt_matching.py --texts 100000 --prompts 100000

Texts are made from a seed: half of them share a head longer than the anchors' reach, as metadata headers do. They are
written to a temporary file. The first search is that of a new process (the operating system has the file in its cache).
Of the texts in a prompt, a third is whole, a third is cut at both ends, a third is unknown. The hostile inputs make
every place of a prompt look like every text. The fuzz run cuts prompts out of a few texts that overlap, contain each
other and differ by a letter, spoils some of them (truncated, whitespace joined anew, HTML escapes, case), and compares
every result for whole texts with a search that looks everywhere. For parts of texts, it tokenises every prompt as a
whole and compares the ids and characters of every token that would be reused with those of the stored text.
"""

from __future__ import annotations

import argparse
import html
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from cacheclip_testing import make_tokenizer

from cacheclip_rag.measuring import lay_out, segment_text
from cacheclip_rag.runtime import TextModel
from cacheclip_rag.store import Catalog, TextIndex

WORDS = ("harbour", "lamp", "of", "the", "stone", "built", "keeper", "in", "a", "year", "river", "and", "oil", "was")
HEAD = "file_path: /data/annual-report.pdf\npage_label: 7\nsection: results\n\n" * 5


def text(rng: random.Random, characters: int) -> str:
    found = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(characters // 8))
    return found[:characters].strip()


FIRST_SEARCH = """
import sys, time
from pathlib import Path
from cacheclip_rag.store import Catalog, TextIndex
prompt = sys.stdin.read()
started = time.perf_counter()
matches = TextIndex(Catalog(Path(sys.argv[1])).database, "bench").find(prompt)
print(time.perf_counter() - started, len(matches))
"""


def scale(folder: Path, num_texts: int, characters: int, num_searches: int) -> dict[str, float]:
    rng = random.Random(0)
    index = TextIndex(Catalog(folder).database, "bench")
    kept = []
    filling_s = 0.0
    for first in range(0, num_texts, 1000):
        batch = [
            (HEAD if number % 2 else "") + text(rng, rng.randrange(800, 1600))
            for number in range(first, min(first + 1000, num_texts))
        ]
        started = time.perf_counter()
        index.add(batch)
        filling_s += time.perf_counter() - started
        kept += rng.sample(batch, min(5, len(batch)))

    def prompt() -> tuple[str, list[str], int]:
        """A prompt, the whole texts in it, and how many characters of stored texts there are."""
        parts: list[str] = []
        cut = []
        while sum(map(len, parts)) < characters:
            stored = rng.choice(kept)
            part = rng.choice([stored, stored[150:-150], text(rng, 900)])
            cut += [part] if part == stored[150:-150] else []
            parts.append(part)
        del parts[-1]  # one too many
        whole = [part for part in parts if part in kept]
        return "\n\n".join(parts), whole, sum(len(part) for part in parts if part in whole or part in cut)

    first_prompt, _, _ = prompt()
    command = [sys.executable, "-P", "-c", FIRST_SEARCH, str(folder)]
    said = subprocess.run(command, input=first_prompt, capture_output=True, text=True, check=True).stdout.split()
    seconds, processor_s, found, placed = [], [], 0, 0
    for _ in range(num_searches):
        searched, whole, of_stored = prompt()
        started, processor_started = time.perf_counter(), time.process_time()
        matches = index.find(searched)
        seconds.append(time.perf_counter() - started)
        processor_s.append(time.process_time() - processor_started)
        assert [searched[m.start : m.stop] for m in matches if m.of is None] == whole
        found, placed = found + sum(match.stop - match.start for match in matches), placed + of_stored
    adding = []
    for _ in range(20):
        new = text(rng, 1200)
        started = time.perf_counter()
        index.add([new])
        adding.append(time.perf_counter() - started)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return {
        "texts": num_texts,
        "prompt_characters": characters,
        "filling_s": round(filling_s, 1),
        "file_bytes_per_text": round(size / num_texts, 1),
        "first_search_of_a_process_ms": round(1000 * float(said[0]), 2),
        "search_ms_median": round(1000 * statistics.median(seconds), 2),
        "search_ms_max": round(1000 * max(seconds), 2),
        "search_processor_ms_median": round(1000 * statistics.median(processor_s), 2),
        "add_one_text_ms_median": round(1000 * statistics.median(adding), 2),
        "characters_found": found,
        "of": placed,
    }


HOSTILE = {
    "runs": ["-" * length for length in range(100, 1100)],
    "different_middles": [f"{'-' * 300}word {number}{'-' * 300}" for number in range(1000)],
    "same_beginnings": [text(random.Random(0), 3000) + text(random.Random(number), 300) for number in range(1000)],
}


def hostile(texts: list[str], characters: int = 8000) -> dict[str, float]:
    index = TextIndex(Catalog().database, "bench")
    index.add(texts)
    prompt = ("-" * characters if texts[0].startswith("-") else texts[0][:2900] * 3)[:characters]
    started = time.perf_counter()
    matches = index.find(prompt)
    seconds = time.perf_counter() - started
    tracemalloc.start()
    index.find(prompt)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {"search_ms": round(1000 * seconds, 2), "peak_mb": round(peak / 1e6, 1), "matches": len(matches)}


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
            index = TextIndex(Catalog().database, "bench")
            index.add(texts)
        parts = [rng.choice(SPOILED)(rng.choice(texts), rng) for _ in range(rng.randrange(1, 5))]
        prompt = rng.choice(["", " ", "\n\n", "Context: "]).join(parts)
        found = [prompt[m.start : m.stop] for m in index.find(prompt, parts=False)]
        matches += len(found)
        wrong += found != everywhere(prompt, texts)
    return {"prompts": num_prompts, "matches": matches, "wrong": wrong}


class Tokens(TextModel):
    """A tokenizer without a model."""

    def __init__(self) -> None:
        self.tokenizer = self.text_tokenizer = make_tokenizer(800, [text(random.Random(0), 9000)])
        self._control_ids = []


Tokens.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def fuzz_parts(num_prompts: int) -> dict[str, int]:
    rng, tokens = random.Random(2), Tokens()
    parts = reused = wrong = 0
    for number in range(num_prompts):
        if number % 500 == 0:
            texts = [text(rng, rng.randrange(200, 1500)) for _ in range(6)]
            texts += [HEAD + texts[0], texts[1] + " " + texts[2], texts[3][100:]]
            index = TextIndex(Catalog().database, "bench")
            index.add(texts)
        pieces = []
        for _ in range(rng.randrange(1, 5)):
            piece = rng.choice(texts)
            start = rng.randrange(len(piece))
            piece = piece[start : start + rng.randrange(1, 1200)]
            for _ in range(rng.choice((0, 0, 0, 1, 2, 5))):
                at = rng.randrange(len(piece) + 1)
                piece = (
                    piece[:at] + rng.choice(("", " ", "\n", "é", "漢", '"', "\\", "a")) + piece[at + rng.randrange(3) :]
                )
            pieces.append(rng.choice((str, str, json.dumps, lambda t: t.replace(" ", "\n> ", 5)))(piece))
        prompt = rng.choice(["", " ", "\n\n", "\n> "]).join(pieces)
        layout = lay_out(segment_text(prompt, index), tokens, tokens.tokenize, ())  # type: ignore[arg-type]
        wrong += layout.token_ids != tokens.tokenize(prompt).ids
        for span in layout.chunks:
            own, stored = slice(span.first, span.first + len(span.tokens)), tokens.tokenize(span.whole)
            places = tuple((a + span.at, b + span.at) for a, b in span.tokens.offsets)
            wrong += stored.ids[own] != span.tokens.ids or stored.offsets[own] != places
            parts, reused = parts + 1, reused + len(span.tokens)
    return {"prompts": num_prompts, "ranges": parts, "tokens": reused, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=10_000)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at_scale = scale(Path(folder), arguments.texts, arguments.characters, arguments.searches)
    result = {
        "scale": at_scale,
        "hostile": {name: hostile(texts) for name, texts in HOSTILE.items()},
        "fuzz": fuzz(arguments.prompts),
        "fuzz_parts": fuzz_parts(arguments.prompts),
    }
    print(json.dumps(result, indent=1))
    sys.exit(1 if result["fuzz"]["wrong"] or result["fuzz_parts"]["wrong"] else 0)


if __name__ == "__main__":
    main()
