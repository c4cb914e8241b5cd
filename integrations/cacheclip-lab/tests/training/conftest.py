"""Samples with short chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from cacheclip_lab.training import finetune
from cacheclip_lab.training.families import synthetic_samples


@pytest.fixture(scope="module")
def with_short_samples() -> Iterator[None]:
    """Fine-tuning makes samples with less filler: the tiny models read many tokens per word."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "synthetic_samples", partial(synthetic_samples, chunk_words=25))
        yield
