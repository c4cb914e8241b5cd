"""An ingestion job for cron: estimates the cost, ingests changed documents, prints a report. A killed job can be run
again and continues. In the shell: ``cacheclip ingest examples/corpus --store … [--dry-run]``."""

from __future__ import annotations

import dataclasses

from common import AUXILIARY, CORPUS, EMBEDDING, FILES, PRIMARY, STORE

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.cli.settings import DEFAULT_SETTINGS, engine_config
from cacheclip_rag.ingest import Embedder, Library, ingest
from cacheclip_rag.ingest.job import plan

models = {"primary": PRIMARY, "auxiliary": AUXILIARY, "embedding": EMBEDDING}
settings = dataclasses.replace(DEFAULT_SETTINGS, **models, chunk_tokens=256)
FOLDER = f"{STORE}-job"


def main() -> None:
    engine, library = CacheClipEngine(engine_config(settings, FOLDER, device="cpu")), Library(FOLDER)
    paths = [CORPUS / name for name in FILES]
    cost = plan(paths, library=library, engine=engine, settings=settings)
    print(f"to do: {cost.computed} chunks, {cost.bytes / 1e6:.0f} MB, about {cost.seconds / 60:.1f} minutes")
    report = ingest(paths, library=library, engine=engine, embedder=Embedder(EMBEDDING), settings=settings)
    print(f"done: {report.added} added, {report.changed} changed, {report.unchanged} unchanged")


if __name__ == "__main__":
    main()
