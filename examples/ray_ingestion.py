"""Ingestion on Ray, as a pipeline of your own: actors encode, one commits; then any machine answers from the store.
First ``cacheclip store create URL``, with ``SHARED_STORE=URL`` (``s3://my-bucket/prod``). ``RAY_ADDRESS`` names a
cluster. In the shell: ``cacheclip ingest … --store URL --engine ray``."""

from __future__ import annotations

import hashlib
import os

import ray
import ray.data
from cacheclip_ingest import Commit, Encode, LibrarySettings
from common import AUXILIARY, CORPUS, FILES, PRIMARY

from cacheclip_rag import CacheClipEngine

URL = os.environ.get("SHARED_STORE", "s3://my-bucket/prod")
config = LibrarySettings(primary=PRIMARY, auxiliary=AUXILIARY).engine_config(URL, device="cpu")


def main() -> None:
    ray.init(log_to_driver=False)
    files = {str(CORPUS / name): (CORPUS / name).read_bytes() for name in FILES}
    documents = [{"path": path, "version": hashlib.sha256(data).hexdigest()} for path, data in files.items()]
    stage = {"batch_format": "pyarrow", "concurrency": 1}  # more for Encode; of Commit, one
    rows = ray.data.from_items(documents).map_batches(
        Encode, fn_constructor_kwargs={"config": config, "chunk_tokens": 256}, batch_size=8, **stage
    )
    commit = {"fn_constructor_kwargs": {"url": URL}, "batch_size": 4096, "num_cpus": 0.1}
    counts = rows.map_batches(Commit, **commit, **stage).to_pandas().sum()
    print(f"{counts['texts']} texts: {counts['computed']} computed, {counts['new']} new")
    ray.shutdown()

    with CacheClipEngine(config) as engine:
        text = next(engine.texts.index.texts())
        print("hits", engine.generate(f"{text}\n\nWhat is this about?", max_tokens=8).stats.hits)


if __name__ == "__main__":
    main()
