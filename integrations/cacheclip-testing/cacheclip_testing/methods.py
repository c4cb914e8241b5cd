"""Conformance suite for methods: inherit it and define the fixture ``method``.

    class TestMine(MethodConformance):
        @pytest.fixture
        def method(self) -> Method:
            return Recompute(MyScorer(), name="mine")

The suite runs the method on a tiny model with its own store folder and needs no network. References come from an
unmodified transformers model, not from this library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cacheclip_rag import CacheClipEngine
from cacheclip_rag.measuring import Prefilled
from cacheclip_rag.methods import Method, describe, preset, vary
from cacheclip_rag.selection import PromptView

from .tiny import SENTENCES, TINY_MODELS, build_auxiliary, build_model

EXACT = 1e-4
"""Largest difference of float32 logits that counts as equal."""
DIFFERENT = 1e-2
"""Smallest difference of float32 logits that counts as different."""
_CHUNKS = (" ".join(SENTENCES[0:3]), " ".join(SENTENCES[3:5]), " ".join(SENTENCES[5:8]))
_QUESTION = "What is the magic number of the harbour master?"


def logit_gap(left: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute difference."""
    return float((left - right).abs().max())


@dataclass(frozen=True, slots=True, eq=False)
class Observed(Method):
    """Behaves like ``inner``, and records its views and masks."""

    inner: Method
    seen: dict[str, Any] = field(default_factory=dict)
    """``view`` and ``masks`` of the last selection."""

    def __getattribute__(self, name: str) -> Any:
        own = ("inner", "seen", "select", "__class__", "__dict__")
        return object.__getattribute__(self if name in own else object.__getattribute__(self, "inner"), name)

    def select(self, view: PromptView, scores: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chosen = self.inner.select(view, scores)
        self.seen.update(view=view, masks=chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class PromptCase:
    """An engine on a tiny model, and prompts of three stored chunks."""

    engine: CacheClipEngine
    folder: str
    """Folder of the primary model."""

    def prefill(self, method: Method) -> Prefilled:
        """Prefill the prompt, after storing its chunks with the method's chunk context."""
        self.engine.precompute(_CHUNKS, method=method)
        prompt = "Read this first.\n\n" + "\n\n".join(_CHUNKS) + f"\n\nQuestion: {_QUESTION}"
        self.engine.prefixes.clear()
        return self.engine.prefill(prompt, method=method, question=_QUESTION)

    @torch.inference_mode()
    def reference(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the last of ``ids`` by an unmodified transformers model with eager attention."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        logits: torch.Tensor = model.eval()(input_ids=ids[None], use_cache=False).logits[0, -1]
        return logits


class MethodConformance(ABC):
    """Tests for methods that reuse stored chunks in one prefill."""

    fills_budget: ClassVar[bool] = True
    """Whether the budget is spent exactly; False if it is only a limit."""

    @pytest.fixture
    @abstractmethod
    def method(self) -> Method:
        """The method to test, without a confidence gate."""

    @pytest.fixture(scope="class")
    @classmethod
    def prompt_case(cls, tmp_path_factory: pytest.TempPathFactory) -> PromptCase:
        """A tiny Llama and an auxiliary model, shared by all tests of the class. Override it for another model."""
        root: Path = tmp_path_factory.mktemp("conformance")
        folder = str(build_model(root / "primary", TINY_MODELS["llama"]))
        auxiliary = str(build_auxiliary(root / "auxiliary"))
        return PromptCase(CacheClipEngine(primary=folder, auxiliary=auxiliary), folder)

    def test_everything_is_reused(self, prompt_case: PromptCase, method: Method) -> None:
        stats = prompt_case.prefill(method).stats
        assert (stats.fallback, stats.hits, stats.misses) == (None, len(_CHUNKS), 0)
        assert (stats.method, stats.nominal_ratio) == (method.name, method.nominal_ratio)

    def test_ratio_one_is_full_prefill(self, prompt_case: PromptCase, method: Method) -> None:
        if not (method.has_ratio and method.exact_at_one):
            return
        prefilled = prompt_case.prefill(method.at(1.0))
        expected = prompt_case.reference(prefilled.layout.ids)
        assert prefilled.stats.effective_ratio == 1.0
        assert logit_gap(prefilled.logits, expected) < EXACT
        assert logit_gap(prompt_case.prefill(_direct(method)).logits, expected) > DIFFERENT, "direct reuse must differ"

    def test_ratio_zero_is_direct_reuse(self, prompt_case: PromptCase, method: Method) -> None:
        if not method.has_ratio:
            return
        prefilled = prompt_case.prefill(method.at(0.0))
        assert prefilled.stats.recomputed_tokens == 0 and prefilled.stats.charged_ratio == 0.0
        direct = prompt_case.prefill(_direct(method)).logits
        assert logit_gap(prefilled.logits, direct) < EXACT
        assert logit_gap(prompt_case.prefill(method.at(0.5)).logits, direct) > 1e-3, "what is recomputed must show"

    @pytest.mark.parametrize("ratio", [0.1, 0.3, 0.7])
    def test_the_budget_is_kept(self, prompt_case: PromptCase, method: Method, ratio: float) -> None:
        if not method.has_ratio:
            return
        stats = prompt_case.prefill(method.at(ratio)).stats
        budget = round(ratio * stats.chunk_tokens)
        assert stats.recomputed_tokens == budget if self.fills_budget else stats.recomputed_tokens <= budget
        assert stats.charged_ratio == pytest.approx(stats.effective_ratio)

    def test_the_same_prompt_gives_the_same_bits(self, prompt_case: PromptCase, method: Method) -> None:
        first, second = prompt_case.prefill(method), prompt_case.prefill(method)
        assert torch.equal(first.logits, second.logits)
        assert first.stats.recomputed_tokens == second.stats.recomputed_tokens

    def test_it_can_be_compared_hashed_and_written_down(self, method: Method) -> None:
        assert hash(method) == hash(replace(method)) and method == replace(method)
        assert vary(method, describe(method)) == method
        if method.has_ratio:
            assert method.at(0.3).nominal_ratio == 0.3 and method.at(0.3).at(method.nominal_ratio) == method


def _direct(method: Method) -> Method:
    return replace(preset("direct"), chunk_context=method.chunk_context)
