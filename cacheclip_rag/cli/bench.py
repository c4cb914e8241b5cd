"""``cacheclip bench``: compares methods' time to the first token in one run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..methods import DEFAULT_METHOD
from .common import (
    AuxiliaryOption,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    JsonOption,
    PrimaryOption,
    VariantsOption,
    output,
    print_json,
)


def bench(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    context_tokens: Annotated[int, typer.Option(help="Tokens of all chunks together.")] = 4096,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of one chunk.")] = 512,
    ratio: Annotated[
        float | None,
        typer.Option(
            "--ratio",
            help="Share of chunk tokens to recompute, 0 to 1, by presets and by variants whose budget names no ratio. "
            "[default: each method's]",
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names of presets and variants.")] = (
        f"full,direct,{DEFAULT_METHOD}"
    ),
    variants: VariantsOption = None,
    runs: Annotated[int, typer.Option(help="Interleaved repeats.")] = 3,
    store: Annotated[
        str | None, typer.Option("--store", help="Keep the chunk caches here. [default: temporary]")
    ] = None,
    keep_page_cache: Annotated[bool, typer.Option(help="Do not drop chunk caches from memory before a run.")] = False,
    explain: Annotated[
        bool, typer.Option(help="Also show each phase's work, and the time that this machine needs for it at least.")
    ] = False,
    embedding: EmbeddingOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure methods on a prompt of generated text; the content of the text does not affect the speed.

    Nothing is retrieved, so --embedding is accepted but not used.
    """
    from ..lab.evaluation.bench import bench as run
    from ..lab.variants import read_variants
    from .settings import config_of_models

    config = config_of_models(
        primary,
        auxiliary,
        dtype,
        store=store,
        device=device,
        recompute_ratio=ratio,
    )
    result = run(
        config,
        variants=read_variants(variants, ratio),
        methods=[name.strip() for name in methods.split(",") if name.strip()],
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        runs=runs,
        keep_page_cache=keep_page_cache,
        explain=explain,
    )
    if as_json:
        print_json(result)
    else:
        _print_table(result)
        if explain:
            _print_explanation(result["explain"])


def _print_table(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        title=f"{result['primary']} + {result['auxiliary']}, {result['chunks']} chunks, {result['runs']} runs (medians)"
    )
    ratios = ("nominal", "effective", "charged")
    for column in ("method", "TTFT s", "min", "max", "vs full", *ratios, "reused", "recomputed", "peak RSS"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in result["methods"].items():
        ttft, speedup = row["ttft_s"], row["speedup_vs_full"]
        table.add_row(
            name,
            *(f"{ttft[key]:.2f}" for key in ("median", "min", "max")),
            "" if speedup is None else f"{speedup:.2f}x",
            *(f"{row[f'{ratio}_ratio']:.3f}" for ratio in ratios),
            str(row["reused_tokens"]),
            str(row["recomputed_tokens"]),
            f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
        )
    output().print(table)


def _print_explanation(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{found['device']}, {found['threads']} threads, {found['dtype']}: seconds and their floor")
    for column in ("method", "phase", "seconds", "work", "floor s", "gap", "operations"):
        table.add_column(column, justify="left" if column in ("method", "phase") else "right")
    for name, phases in found["methods"].items():
        for number, (phase, row) in enumerate(phases.items()):
            table.add_row(
                "" if number else name,
                phase,
                f"{row['seconds']:.4f}",
                _work(row),
                "" if row["floor_s"] is None else f"{row['floor_s']:.4f}",
                "" if row["gap"] is None else f"{row['gap']:.2f}x",
                str(row["operations"]),
            )
        table.add_section()
    output().print(table)
    rates = found["rates"]
    for each in rates["matmul"]:
        shape = f"{each['rows']} x {each['inputs']} times {each['inputs']} x {each['outputs']}"
        output().print(f"{each['model']}: {shape}: {each['flops_per_s'] / 1e9:.1f} GFLOP/s")
    for name in ("copy", "read", "tokenize"):
        if rates[f"{name}_bytes_per_s"] is not None:
            output().print(f"{name}: {rates[f'{name}_bytes_per_s'] / 1e6:.1f} MB/s")
    output().print(f"processor: {found['processor']}")


def _work(row: dict[str, Any]) -> str:
    if row["flops"] is not None:
        return f"{row['flops'] / 1e9:.2f} GFLOP"
    return "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f} MB"
