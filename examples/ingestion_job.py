"""An ingestion job for cron: estimates the cost, ingests changed documents, prints a report. A killed job can be run
again and continues. In the shell: ``cacheclip ingest examples/corpus --store … [--dry-run]``."""

from __future__ import annotations

from cacheclip_ingest import Embedder, Library, LibrarySettings, ingest, plan_ingestion
from common import AUXILIARY, CORPUS, EMBEDDING, FILES, PRIMARY, STORE

from cacheclip_rag import CacheClipEngine

settings = LibrarySettings(primary=PRIMARY, auxiliary=AUXILIARY, embedding=EMBEDDING, chunk_tokens=256)
FOLDER = f"{STORE}-job"


def main() -> None:
    engine, library = CacheClipEngine(settings.engine_config(FOLDER, device="cpu")), Library(FOLDER)
    paths = [CORPUS / name for name in FILES]
    cost = plan_ingestion(paths, library=library, engine=engine, settings=settings)
    print(f"to do: {cost.computed} chunks, {cost.bytes / 1e6:.0f} MB, about {cost.seconds / 60:.1f} minutes")
    report = ingest(paths, library=library, engine=engine, embedder=Embedder(EMBEDDING), settings=settings)
    print(f"done: {report.added} added, {report.changed} changed, {report.unchanged} unchanged")


if __name__ == "__main__":
    main()
