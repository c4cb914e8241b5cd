"""llama.cpp keeps the promises of every runtime, beside transformers' numbers of the same weights."""

from pathlib import Path

import torch
from cacheclip_testing import RuntimeConformance
from tiny_gguf import write_gguf
from transformers import AutoModelForCausalLM

from cacheclip_rag.models.load import load_any
from cacheclip_rag.runtime import Runtime


class OfArchitecture(RuntimeConformance):
    tolerance = 0.1
    architecture: str

    def make_runtime(self, folder: Path) -> Runtime:
        return load_any(str(write_gguf(folder, self.architecture)))

    def reference_logits(self, runtime: Runtime, ids: torch.Tensor, num_decoded: int) -> torch.Tensor:
        folder = Path(runtime.name).parent / "model"
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        with torch.inference_mode():
            logits: torch.Tensor = model(ids[None]).logits[0, -1]
        return logits


class TestLlama(OfArchitecture):
    architecture = "llama"


class TestQwen2(OfArchitecture):
    architecture = "qwen2"


class TestGemma3(OfArchitecture):
    architecture = "gemma3"
