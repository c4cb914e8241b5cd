"""``cacheclip bench``: compares methods' time to the first token in one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cacheclip_rag.methods import DEFAULT_METHOD
from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, print_json

from .common import VariantsOption, measured, print_tables


@engine_options("primary", "auxiliary", "recompute_ratio", "dtype", "device")
def bench(
    settings: CommandSettings,
    context_tokens: Annotated[int, typer.Option(help="Tokens of all chunks together.")] = 4096,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of one chunk.")] = 512,
    methods: Annotated[str, typer.Option(help="Comma-separated names of presets and variants.")] = (
        f"full,direct,{DEFAULT_METHOD}"
    ),
    variants: VariantsOption = None,
    runs: Annotated[int, typer.Option(help="Interleaved repeats.")] = 3,
    keep_page_cache: Annotated[
        bool, typer.Option("--keep-page-cache", help="Do not drop chunk caches from memory before a run.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure methods on a prompt of generated text; the content of the text does not affect the speed. A second
    question on the same text finds what the first left.

    Variants whose budget names a ratio keep it.
    """
    from ..evaluation.bench import bench as run
    from ..variants import read_variants

    config = measured(settings)
    result = run(
        config,
        variants=read_variants(variants, config.fixed_ratio),
        methods=[name.strip() for name in methods.split(",") if name.strip()],
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        runs=runs,
        keep_page_cache=keep_page_cache,
    )
    if as_json:
        print_json(result)
    else:
        _print_table(result)


def _print_table(result: dict[str, Any]) -> None:
    ratios = ("nominal", "effective", "charged")
    titles = ("method", "TTFT s", "min", "max", "vs full", "second s", *ratios, "reused", "recomputed", "peak RSS")
    rows = [
        (
            name,
            *(f"{row['ttft_s'][key]:.2f}" for key in ("median", "min", "max")),
            "" if row["speedup_vs_full"] is None else f"{row['speedup_vs_full']:.2f}x",
            f"{row['second_ttft_s']['median']:.2f}",
            *(f"{row[f'{ratio}_ratio']:.3f}" for ratio in ratios),
            str(row["reused_tokens"]),
            str(row["recomputed_tokens"]),
            f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
        )
        for name, row in result["methods"].items()
    ]
    models = f"{result['primary']} + {result['auxiliary']}"
    print_tables({f"{models}, {result['chunks']} chunks, {result['runs']} runs (medians)": (titles, rows)})
