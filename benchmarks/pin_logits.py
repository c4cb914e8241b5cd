"""Pin what is computed: digests of logits of 20 prompts, to be compared bit for bit after the code has changed.

    python benchmarks/pin_logits.py write FILE [--models llama,gemma3]
    python benchmarks/pin_logits.py check FILE [--models smollm2-135m]

Tiny models of six architectures and two real ones; five presets; four recompute ratios; beside the logits the answer's
first tokens and what the statistics say. Exit code 1 if anything differs. The numbers hold for one kind of processor,
one version of torch and two threads, which the file names: write it with the old code where they are others.

``pins.json`` beside this script was written after prompts were tokenised as a whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from cacheclip_testing import TINY_MODELS, build_auxiliary, build_model

from cacheclip_rag import CacheClipEngine, SamplingParams
from cacheclip_rag.measuring import processor_name
from cacheclip_rag.methods import preset

_TINY = ("llama", "qwen2-sliding", "gemma3", "phi3-partial", "gpt-oss", "smollm3")
_REAL = ("smollm2-135m", "qwen2.5-coder-0.5b")
_CONTEXTS = ("passages", "prefix")
_PLAIN = ("full", "prefix", "direct")
_WITH_RATIO = ("epic", "cacheclip")
_RATIOS = (0.0, 0.1, 0.2, 1.0)
_ANSWERED_AT = 0.2
_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "harbour ferry island station engine winter timetable captain signal northern bridge letter market river garden "
    "window morning company number history question answer reason record measure mountain railway village library"
).split()


class Case(NamedTuple):
    """One prompt on one pair of models."""

    label: str
    primary: str
    auxiliary: str
    context: str
    num_words: int


def text(generator: random.Random, count: int) -> str:
    """English words without meaning, in sentences of nine."""
    words = [generator.choice(_WORDS) for _ in range(count)]
    return " ".join(word.capitalize() + "." if n % 9 == 0 else word for n, word in enumerate(words))


def cases(folder: Path, models: tuple[str, ...]) -> Iterator[Case]:
    """Two prompts for every tiny model, four for every real one."""
    auxiliary = str(build_auxiliary(folder / "auxiliary"))
    for name in models:
        if name in _TINY:
            primary = str(build_model(folder / name, TINY_MODELS[name]))
            for number, context in enumerate(_CONTEXTS):
                yield Case(f"{name}#{number}", primary, auxiliary, context, 24 + 16 * number)
        else:
            for number in range(4):
                yield Case(f"{name}#{number}", f"packaged:{name}", "packaged:smollm2-135m", _CONTEXTS[number % 2], 60)


def digest(logits: torch.Tensor) -> str:
    """Of every bit."""
    return hashlib.sha256(logits.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def pins_of(case: Case, engine: CacheClipEngine) -> dict[str, dict[str, Any]]:
    """What every preset computes at every ratio, by name."""
    generator = random.Random(case.label)
    chunks = [text(generator, case.num_words) for _ in range(4)]
    question = "Which " + text(generator, 8) + "?"
    prompt = "\n\n".join(chunks) + f"\n\nQuestion: {question}"
    engine.precompute(chunks)
    found: dict[str, dict[str, Any]] = {}
    for name in (*_PLAIN, *_WITH_RATIO):
        for ratio in _RATIOS if name in _WITH_RATIO else (None,):
            method = preset(name) if ratio is None else preset(name).at(ratio)
            engine.prefixes.clear()
            prefilled = engine.prefill(prompt, method=method, question=question)
            pin = found[f"{case.label} {name}" + ("" if ratio is None else f"@{ratio}")] = {
                "logits": digest(prefilled.logits),
                "recomputed": prefilled.stats.recomputed_tokens,
                "fallback": prefilled.stats.fallback,
                "charged": round(prefilled.stats.charged_ratio, 9),
            }
            if ratio in (None, _ANSWERED_AT):
                engine.prefixes.clear()
                answer = engine.generate(prompt, SamplingParams(max_tokens=6), method=method, question=question)
                pin["answer"] = list(answer.token_ids)
    return found


def pin(models: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Pins of every case of these models."""
    found: dict[str, dict[str, Any]] = {}
    engines: dict[tuple[str, str], CacheClipEngine] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), models):
            key = case.primary, case.context
            if key not in engines:
                engines[key] = CacheClipEngine(
                    primary=case.primary, auxiliary=case.auxiliary, chunk_context=case.context
                )
            found.update(pins_of(case, engines[key]))
            print(case.label, file=sys.stderr, flush=True)
    return found


def differences(expected: dict[str, Any], found: dict[str, Any], models: tuple[str, ...]) -> list[str]:
    """Lines about pins of these models that differ or are missing on one side."""
    expected = {name: value for name, value in expected.items() if name.partition("#")[0] in models}
    return [
        f"{name}: {expected.get(name)} was pinned, {found.get(name)} is computed"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def about() -> dict[str, Any]:
    """What pins depend on beside the code."""
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    return {
        "processor": processor_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", default=",".join((*_TINY, *_REAL)), help="comma-separated")
    given = parser.parse_args()
    models = tuple(given.models.split(","))
    if unknown := set(models) - {*_TINY, *_REAL}:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    torch.set_num_threads(2)
    logging.getLogger("cacheclip_rag").setLevel(logging.ERROR)  # nothing here is certified
    found = pin(models)
    if given.action == "write":
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(pin)}" for name, pin in found.items())
        given.file.write_text(f'{{"about": {json.dumps(about())}, "pins": {{\n{lines}\n}}}}\n')
        print(f"{len(found)} pins written")
        return
    pinned = json.loads(given.file.read_text())
    wrong = differences(pinned["pins"], found, models)
    if wrong and pinned["about"] != about():
        print(f"The pins are of {pinned['about']}, and this is {about()}.")
    print("\n".join([*wrong, f"{len(found)} pins compared, {len(wrong)} differ"]))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
