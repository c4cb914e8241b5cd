"""How much of the package one question runs through: files and functions called by one ``generate``.

    python benchmarks/opened_by_generate.py [--verbose]

Tiny models with random weights, three chunks on disk, method ``cacheclip``; the question is asked once before, so that
what happens once (loading, decisions about a method) is not counted. Comprehensions and lambdas are not counted.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType

from cacheclip_testing import SENTENCES, TINY_MODELS, build_auxiliary, build_model

import cacheclip_rag
from cacheclip_rag import CacheClipEngine, SamplingParams

ROOT = str(Path(cacheclip_rag.__file__).parent)
CHUNKS = [" ".join(SENTENCES[0:3]), " ".join(SENTENCES[3:5]), " ".join(SENTENCES[5:8])]
QUESTION = "Question: what is the magic number of the harbour master?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="name files and functions")
    verbose = parser.parse_args().verbose
    with tempfile.TemporaryDirectory() as folder:
        primary, auxiliary = Path(folder) / "primary", Path(folder) / "auxiliary"
        build_model(primary, TINY_MODELS["llama"])
        build_auxiliary(auxiliary)
        engine = CacheClipEngine(
            primary=str(primary), auxiliary=str(auxiliary), store=Path(folder) / "store", method="cacheclip"
        )
        found = opened_by(engine, CHUNKS)
    print(f"{len(found)} files, {sum(map(len, found.values()))} functions")
    for file in sorted(found) if verbose else ():
        print(f"  {file}: {', '.join(sorted(found[file]))}")


def opened_by(engine: CacheClipEngine, chunks: list[str]) -> dict[str, set[str]]:
    """Names of the package's functions that an answer over these chunks calls, by file."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    prompt, params = "\n\n".join([*chunks, QUESTION]), SamplingParams(max_tokens=8)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT) and not code.co_name.startswith("<"):
            found[code.co_filename[len(ROOT) + 1 :]].add(code.co_qualname)

    engine.precompute(chunks)
    engine.generate(prompt, params)
    engine.prefixes.clear()  # the question would continue its own KV
    gc.collect()  # what earlier engines leave behind would be counted while it is freed
    gc.disable()
    sys.setprofile(profile)
    try:
        engine.generate(prompt, params)
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


if __name__ == "__main__":
    main()
