"""Converts a GGUF file to a transformers folder: float32 safetensors, config and tokenizer.

Transformers needs tens of seconds to load a GGUF file; the converted folder loads in about two seconds.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


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
    with quiet_transformers(), progress_bar(f"converting {name}", 3, "steps") as advance:
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
