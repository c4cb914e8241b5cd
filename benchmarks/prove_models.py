"""Which classes of the installed transformers are proven exact: each is built tiny, saved, loaded and proven.

    python benchmarks/prove_models.py [NAME …] [--json FILE]

Prints a line for each class: exact, recurrent (exact by state maps), refused with the reason, or not built: its config
cannot be made small. The documentation and the tests read
``integrations/cacheclip-testing/cacheclip_testing/classes.json``: write it anew for another transformers, and when
other models are taken. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import tempfile
import warnings
from pathlib import Path

import transformers
from cacheclip_testing import build_class, class_names

from cacheclip_rag import CacheClipError, UnsupportedModelError
from cacheclip_rag.models import load_model, unload_models
from cacheclip_rag.runtime import Runtime

_LEFT_OUT = re.compile(
    r"^.*?model '[^']*' (\('[^']+'\) )?(cannot be reused exactly: )?"
    r"|^\w+ of transformers |(?<=has its )\d+ | by [\d.e+-]+"
)
"""Of a message: what is before the reason, and numbers."""


def verdict(name: str, folder: Path) -> tuple[str, str]:
    """``exact``, ``recurrent``, ``refused`` or ``unbuilt``, and why."""
    try:
        build_class(folder, name)
    except Exception as error:  # a class of any form
        return "unbuilt", f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        runtime: Runtime = load_model(folder)
    except UnsupportedModelError as error:
        return "refused", _LEFT_OUT.sub("", str(error).partition(". ")[0])
    except CacheClipError as error:  # a pass of the whole model failed
        return "unbuilt", str(error).partition(". ")[0]
    finally:
        unload_models()
    return "recurrent" if runtime.computed_edges[0] else "exact", ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model_type of a config (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    verdicts: dict[str, dict[str, str]] = {"exact": {}, "recurrent": {}, "refused": {}, "unbuilt": {}}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CACHECLIP_HOME"] = folder
        for name in options.names or class_names():
            kind, why = verdict(name, Path(folder) / name)
            verdicts[kind][name] = why
            print(f"{name}: {kind} {why}".rstrip(), flush=True)
    print(", ".join(f"{len(names)} {kind}" for kind, names in verdicts.items()))
    if options.json:
        written = {
            "transformers": transformers.__version__,
            "exact": [*verdicts["exact"]],
            "recurrent": [*verdicts["recurrent"]],
            "refused": verdicts["refused"],
        }
        options.json.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
