"""Long runs that continue: what benchmarks ask of many questions, kept in a log of one JSON object a line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cacheclip_lab.evaluation.records import Record, read_records

from cacheclip_rag.plugins import progress_bar

Asked = TypeVar("Asked")


def ask_each(
    log: Path, things: Mapping[str, Asked], ask: Callable[[Asked], dict[str, Any]], noun: str = "questions"
) -> list[dict[str, Any]]:
    """What ``ask`` says of each thing, by its id; things that the log has are not asked again."""
    lines = log.read_text().splitlines() if log.exists() else []
    done = {item["id"]: item for item in map(json.loads, lines)}
    with progress_bar("asking", len(things), noun) as advance, log.open("a") as file:
        for number, (name, thing) in enumerate(things.items(), 1):
            if name not in done:
                done[name] = ask(thing)
                print(json.dumps(done[name]), file=file, flush=True)
            advance(number)
    return [done[name] for name in things]


def spread(paths: str, *, half: str | None, limit: int, least_chunks: int = 0) -> dict[str, Record]:
    """Questions by id, at most ``limit``, of files in turn (comma-separated)."""
    files = [read_records(path, half=half).records for path in paths.split(",")]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*files))
    records = (record for record in turns if record is not None and len(record.chunks) >= least_chunks)
    return {record.id: record for record in itertools.islice(records, limit)}
