"""Fewer parameters and examples in ``make test`` than in ``make test-all``, which sets ``CACHECLIP_TEST_ALL``."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest


def some_of(step: int, indirect: Sequence[str] = (), **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise with every ``step``-th combination, and with all of them with ``CACHECLIP_TEST_ALL=1``.

    With fewer steps than the last parameter has values, and no common divisor with their number, the others meet in all
    combinations, each beside another value of the last one."""
    rows = [row if len(row) > 1 else row[0] for row in itertools.product(*values.values())]
    chosen = rows if os.environ.get("CACHECLIP_TEST_ALL") else rows[::step]
    return pytest.mark.parametrize(",".join(values), chosen, indirect=indirect)


def examples(count: int, **options: Any) -> hypothesis.settings:
    """So many examples of a property, and a third of them without ``CACHECLIP_TEST_ALL=1``."""
    count = count if os.environ.get("CACHECLIP_TEST_ALL") else count // 3
    return hypothesis.settings(max_examples=count, deadline=None, **options)
