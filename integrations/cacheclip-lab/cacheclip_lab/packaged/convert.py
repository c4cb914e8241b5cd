"""Converts a GGUF file to a transformers folder: float32 safetensors, config and tokenizer.

Transformers needs tens of seconds to load a GGUF file; the converted folder loads in about two seconds.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_READING = threading.Lock()


def convert_gguf(gguf_file: Path, target: Path, *, name: str, source_sha256: str) -> None:
    """Write ``gguf_file`` as a transformers folder, which records ``source_sha256``, into the existing folder
    ``target`` (float32 weights)."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cacheclip_rag.plugins import progress_bar
    from cacheclip_rag.runtime import check_tensors, quiet_transformers

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf_file.parent),
        "gguf_file": gguf_file.name,
        "trust_remote_code": False,
    }
    with _read_once(), quiet_transformers(), progress_bar(f"converting {name}", 3, "steps") as advance:
        model, found = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        check_tensors(model, found, name)
        advance(1)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        advance(2)
        # transformers refuses save_pretrained for a model loaded from GGUF: the quantiser is "not serializable".
        # The weights are dense now, so the quantisation entry is removed.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        state = _without_aliases(model.state_dict())
        save_file(state, target / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(target)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)
        advance(3)
    (target / "cacheclip_source.json").write_text(json.dumps({"gguf_sha256": source_sha256}, indent=2) + "\n")
    logger.info("converted %s to %s", gguf_file.name, target)


@contextmanager
def _read_once() -> Iterator[None]:
    """Meanwhile transformers reads a GGUF file's fields once, not three times, from an array that is no memmap, whose
    slices are slow, and makes its table of names once, not for each module. A 0.5B with 151,000 tokens is converted
    in 17 s, not 57."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        data = property(lambda self: self.array, lambda self, mapped: setattr(self, "array", np.asarray(mapped)))

    with _READING:
        own = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(own[1])
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = own


def _without_aliases(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep one of each group of tensors that share memory (tied embeddings), because safetensors refuses aliases."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        address = tensor.data_ptr()
        if address not in seen:
            seen.add(address)
            kept[name] = tensor.contiguous()
    return kept
