"""What one question makes a GPU and its host do, counted without a GPU: kernels, copies to it, waits.

    python benchmarks/launches.py
    python benchmarks/launches.py --tokens 16384 --methods direct,cacheclip

Narrow random models with as many layers and heads as an 8B primary and SmolLM2-135M, and with the tokenizers of
``--primary`` and ``--auxiliary``, compute on the device that the tests pretend (``tests/models/pretend.py``). A copy is
blocking if the host waits for it. ``cold``: chunks come from the disk. ``warm``: they were used before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cacheclip_lab.timing.texts import QUESTION, SECOND_QUESTION, make_texts

from cacheclip_rag import CacheClipEngine, EngineConfig, SamplingParams
from cacheclip_rag.models import resolve, weights_digest
from cacheclip_rag.selection import HeadSet

HEADS = ((4, 0), (4, 5), (7, 2), (10, 1), (10, 8), (12, 3), (12, 4), (15, 0), (15, 6))
HEADS += ((17, 2), (17, 7), (19, 1), (21, 5), (21, 8), (23, 0), (23, 3))
"""Of the auxiliary: 16 in 9 layers, as in the head set that is shipped."""
COUNTS = ("kernels", "copies", "blocking", "stops")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", default="packaged:qwen2.5-coder-0.5b", help="model with a tokenizer")
    parser.add_argument("--auxiliary", default="packaged:smollm2-135m", help="model with a tokenizer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--methods", default="full,direct,cacheclip")
    parser.add_argument("--names", type=int, default=0, help="print so many operations of each question")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("| method | | kernels | copies | blocking | waits |\n|---|---|---|---|---|---|")
    for row in measure(options):
        rows.append(row)
        print(
            "|", row["method"], "|", row["state"], "|", " | ".join(f"{row[name]:,}" for name in COUNTS), "|", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}))


def measure(options: argparse.Namespace) -> Any:
    import pytest
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.models.pretend import move, pretended

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        folder, fits = Path(name), patch("cacheclip_rag.runtime.transformers.packed_weights.pack_weights")
        primary = build(folder / "primary", resolve(options.primary), (options.layers, 32, 8, 64))
        auxiliary = build(folder / "auxiliary", resolve(options.auxiliary), (30, 9, 3, 72))
        config = EngineConfig(
            primary=primary, auxiliary=auxiliary, dtype=options.dtype, device="cpu", store=folder / "store"
        )
        engine = CacheClipEngine(config)
        with fits:  # the device takes plain weights
            count = round(options.tokens / options.chunk_tokens)
            *texts, other = make_texts(engine.primary.tokenize, count + 1, options.chunk_tokens)
            engine.precompute([*texts, other])
        assert engine.auxiliary is not None
        weights = weights_digest(engine.auxiliary.fingerprint)
        heads = HeadSet(weights, HEADS, torch.full((len(HEADS),), 1 / len(HEADS)), sinks=4)
        # layers are gathered together as if heads were 128 wide
        together = "cacheclip_rag.runtime.transformers.cache._TOGETHER"
        with pretended(monkeypatch, as_on_cpu=False) as queue, patch(together, 2**27 * 8 // 128):
            move(engine.primary)
            move(engine.auxiliary)
            for method in options.methods.split(","):
                engine = CacheClipEngine(config)  # nothing of it is on the device
                engine.parts.head_sets.use(heads)
                for state, question in (("other", QUESTION), ("cold", QUESTION), ("warm", SECOND_QUESTION)):
                    engine.prefixes.clear()
                    before = queue.counts()
                    prompt = "\n\n".join([*(texts if state != "other" else [other]), f"Question: {question}"])
                    answer = engine.generate(prompt, SamplingParams(max_tokens=1), method=method, question=question)
                    assert answer.stats.fallback is None, answer.stats
                    work = {name: each - before[name] for name, each in queue.counts().items()}
                    if state != "other":  # which reads shared prefixes, for instance
                        if options.names:
                            print(
                                *(f"{name}: {each.most_common(options.names)}" for name, each in work.items()), sep="\n"
                            )
                        yield {"method": method, "state": state, **{name: each.total() for name, each in work.items()}}


def build(folder: Path, tokenizer: Path, sizes: tuple[int, int, int, int]) -> str:
    """A narrow Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    layers, heads, kv_heads, hidden = sizes
    folder.mkdir()
    source = json.loads((tokenizer / "config.json").read_text())
    config = LlamaConfig(
        **{name: source.get(name) for name in ("vocab_size", "eos_token_id", "bos_token_id")},
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        initializer_range=0.25,
    )
    torch.manual_seed(layers)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (tokenizer / file).exists():
            shutil.copy(tokenizer / file, folder / file)
    return str(folder)


if __name__ == "__main__":
    main()
