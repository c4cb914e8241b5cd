"""``cacheclip profile``: measures how long prefills and reads take here, for ``recompute_ratio="auto"``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ..methods import DEFAULT_METHOD
from .common import (
    AuxiliaryDeviceOption,
    AuxiliaryOption,
    ChunkContextOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    PrimaryOption,
    VariantsOption,
    output,
    print_json,
)

_SHOWN = ((1024, 10), (4096, 32), (16384, 128))
"""Tokens and chunks of the prompts of the table."""


def profile(
    primary: PrimaryOption = None,
    auxiliary: AuxiliaryOption = None,
    method: Annotated[str, typer.Option(help="Preset or variant whose ratio is to be chosen.")] = DEFAULT_METHOD,
    variants: VariantsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "cpu",
    auxiliary_device: AuxiliaryDeviceOption = None,
    chunk_context: ChunkContextOption = None,
    codec: Annotated[str | None, typer.Option(help="Codec of the primary's chunk caches.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Store whose reading speed is measured too. It is left as it was.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure prefills of growing prompts on this machine, and save the profile by which recompute ratios are chosen.

    Run it while nothing else keeps the machine busy, with the settings of the engine that will use it.
    """
    from ..engine import CacheClipEngine
    from ..lab.variants import method_named, read_variants
    from ..plan.controller import Work
    from .settings import config_of_models

    config = config_of_models(
        primary,
        auxiliary,
        dtype,
        chunk_context,
        method=method_named(method, read_variants(variants)),
        device=device,
        auxiliary_device=auxiliary_device,
        codec=codec,
        store=store,
    )
    engine = CacheClipEngine(config)
    found = engine.profile_machine()
    rows = []
    for tokens, chunks in _SHOWN:
        work = Work(tokens, stale=round(0.98 * tokens), chunks=chunks)
        rows.append((tokens, chunks, found.plain_s(work), *(sum(found.fused_s(work, r)) for r in (0.1, 0.2, 0.4))))
    if as_json:
        print_json({**asdict(found), "path": str(found.path)})
        return
    from rich.table import Table

    table = Table(title=f"Predicted seconds to the first token, {config.primary} on {found.identity['processors'][0]}")
    for column in ("prompt tokens", "chunks", "plain prefill", "ratio 0.1", "ratio 0.2", "ratio 0.4"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(f"{row[0]:,}", str(row[1]), *(f"{seconds:.2f}" for seconds in row[2:]))
    output().print(table)
    for medium, line in found.media.items():
        if line.second:
            output().print(f"Reading from {medium}: {1e-6 / line.second:,.0f} MB/s.")
    output().print(f"Saved as {found.path}.")
