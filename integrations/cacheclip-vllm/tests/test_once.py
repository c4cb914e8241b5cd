"""Errors that many requests cause are warned of once."""

from __future__ import annotations

import logging

import pytest
from cacheclip_vllm import once


def test_an_error_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = once.WarnOnce(logging.getLogger("once"))
    with caplog.at_level(logging.DEBUG, "once"):
        for _ in range(2):
            warn("plain: %s", ValueError("gone"), traced=True)
    assert [(record.levelname, record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("WARNING", "plain: ValueError: gone", True),
        ("DEBUG", "plain: ValueError: gone", False),
    ]


def test_errors_that_requests_make_up_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_MOST", 3)
    warn = once.WarnOnce(logging.getLogger("once"))
    with caplog.at_level(logging.WARNING, "once"):
        for number in [*range(5), *range(5)]:
            warn("plain: %s", ValueError(number))
    assert [record.getMessage()[-1] for record in caplog.records] == ["0", "1", "2"]
