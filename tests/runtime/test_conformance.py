"""The runtimes of the package keep the promises that the suite for third parties asks for."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cacheclip_testing.fake import FakeRuntime
from cacheclip_testing.runtimes import RuntimeConformance
from cacheclip_testing.tiny import TINY_MODELS, build_model
from transformers import AutoModelForCausalLM

from cacheclip_rag import CacheClipEngine, ConfigurationError
from cacheclip_rag.models.load import load_any, register_runtime
from cacheclip_rag.runtime.base import Runtime


class TestFake(RuntimeConformance):
    def make_runtime(self, folder: Path) -> Runtime:
        return FakeRuntime("conformance")

    def reference_logits(self, runtime: Runtime, ids: torch.Tensor, num_decoded: int) -> torch.Tensor:
        """The rule of the fake, written again: words by the digest of the prompt, then the end."""
        prompt = ids[: len(ids) - num_decoded].numpy().astype(np.int64)
        digest = hashlib.sha256(prompt.tobytes()).digest()
        words = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
        answer = runtime.tokenize(" ".join(words[byte % 8] for byte in digest[1 : 5 + digest[0] % 7])).ids
        state, logits = runtime.prefill(torch.tensor([1]), 1)
        expected = torch.zeros_like(logits)
        expected[answer[num_decoded] if num_decoded < len(answer) else 0] = 100.0
        return expected

    def test_foreign_kv_is_refused(self, engine: CacheClipEngine) -> None:
        """Twin of equal answers: the fake must notice KV that is not the chunk's, or equality would prove nothing."""
        text, other = "A chunk of seven words and more.", "Another chunk of words that is stored."
        engine.precompute([text, other])
        caches = engine.parts.kv_sources(engine.make_method()).primary
        foreign = caches.read(other)
        assert foreign is not None
        engine.store.put(caches.key(text), foreign.tensor(), "float32", text=text)
        with pytest.raises(ConfigurationError, match="does not belong to the chunk"):
            engine.generate(f"{text}\n\nWhat?")


class TestTransformers(RuntimeConformance):
    def make_runtime(self, folder: Path) -> Runtime:
        return load_any(str(build_model(folder / "model", TINY_MODELS["qwen2"])))

    def reference_logits(self, runtime: Runtime, ids: torch.Tensor, num_decoded: int) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(runtime.name, attn_implementation="eager")
        with torch.inference_mode():
            logits: torch.Tensor = model(ids[None]).logits[0, -1]
        return logits


def test_a_runtime_that_forgot_a_method_is_not_made() -> None:
    """Python names the method before a model is loaded."""
    own = {"encode", "prefill", "fuse", "decode_step"}
    assert Runtime.__abstractmethods__ == own | {"tokenize", "decode_ids", "has_chat_template", "render_chat"}


class TestSchemes:
    def test_a_scheme_makes_runtimes_once(self) -> None:
        made = []

        def factory(name: str, *, dtype: str, device: str) -> Runtime:
            made.append((name, dtype, device))
            return FakeRuntime(name, dtype=dtype)

        register_runtime("counted", factory)
        first, again = load_any("counted:one"), load_any("counted:one")
        assert first is again and load_any("counted:two") is not first
        assert made == [("one", "float32", "cpu"), ("two", "float32", "cpu")]

    @pytest.mark.parametrize("scheme", ["", "c", "C:", "two words", "9x"])
    def test_a_scheme_is_a_word(self, scheme: str) -> None:
        with pytest.raises(ConfigurationError, match="scheme must be"):
            register_runtime(scheme, FakeRuntime)
