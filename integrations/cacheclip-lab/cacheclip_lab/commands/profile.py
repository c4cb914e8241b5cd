"""``cacheclip profile``: measures how long prefills and reads take here, for ``recompute_ratio="auto"``."""

from __future__ import annotations

from dataclasses import asdict

from cacheclip_rag.plugins import CommandSettings, JsonOption, engine_options, print_json

from .common import print_tables

_SHOWN = ((1024, 10), (4096, 32), (16384, 128))
"""Tokens and chunks of the prompts of the table."""


@engine_options("store", "primary", "auxiliary", "method")
def profile(settings: CommandSettings, as_json: JsonOption = False) -> None:
    """Measure prefills of growing prompts on this machine, and save the profile by which recompute ratios are chosen.

    Run it while nothing else keeps the machine busy, with the settings of the engine that will use it. The speed of
    reading from a store is measured too; the store is left as it was.
    """
    from cacheclip_rag import CacheClipEngine

    from ..timing.controller import Work

    config = settings.store_config() if settings.engine.get("store") else settings.config()
    engine = CacheClipEngine(config)
    found = engine.profile_machine()
    if as_json:
        print_json({**asdict(found), "path": str(found.path)})
        return
    rows = []
    for tokens, chunks in _SHOWN:
        work = Work(tokens, stale=round(0.98 * tokens), chunks=chunks)
        seconds = (found.plain_s(work), *(sum(found.fused_s(work, ratio)) for ratio in (0.1, 0.2, 0.4)))
        rows.append((f"{tokens:,}", str(chunks), *(f"{each:.2f}" for each in seconds)))
    title = f"Predicted seconds to the first token, {config.primary} on {found.identity['processors'][0]}"
    titles = ("prompt tokens", "chunks", "plain prefill", "ratio 0.1", "ratio 0.2", "ratio 0.4")
    reading = [
        f"Reading from {medium}: {1e3 * (line.constant or line.first):,.1f} ms, then {1e-6 / line.second:,.0f} MB/s."
        for medium, line in found.media.items()
        if line.second
    ]
    speed = 4096 / found.plain_s(Work(4096, stale=0, chunks=1))
    prefill = f"Plain prefill of 4,096 tokens: {speed:,.0f} tokens a second."
    print_tables({title: (titles, rows)}, prefill, *reading, f"Saved as {found.path}.")
