"""Samples with short chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from cacheclip_rag.lab.training import finetune
from cacheclip_rag.lab.training.families import synthetic_samples
from cacheclip_rag.lab.training.outcomes import Outcome

short_samples = partial(synthetic_samples, chunk_words=25)


def made(kl: float, first: int, answers: int, count: int = 10, f1: float = 0.5) -> tuple[Outcome, ...]:
    """Made-up outcomes of ``count`` prompts: KL, numbers of equal first tokens and equal answers, and F1 (full
    prefill's is 0.8)."""
    return tuple(Outcome(kl, kl, number < first, number < answers, f1, 0.8) for number in range(count))


@pytest.fixture(scope="module")
def with_short_samples() -> Iterator[None]:
    """Fine-tuning makes samples with less filler: the tiny models read many tokens per word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "synthetic_samples", short_samples)
        yield
