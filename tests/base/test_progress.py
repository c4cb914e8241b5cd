"""What long work says of itself, on a clock of its own."""

from __future__ import annotations

import pytest

from cacheclip_rag.base.progress import progress_bar


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def shown(capsys: pytest.CaptureFixture[str], total: int, *, done: int, steps: int, step_s: float) -> str:
    """What stands behind the name of a bar that is left after so many steps."""
    clock = Clock()
    with progress_bar("asking", total, "answers", done=done, get_time=clock) as advance:
        for number in range(1, steps + 1):
            clock.now_s += step_s
            advance(done + number)
    return capsys.readouterr().err.rpartition("asking")[2]


@pytest.mark.parametrize(("step_s", "left"), [(2.0, "0:00:14"), (40.0, "0:04:40"), (1800.0, "3:30:00")])
def test_time_left_of_slow_steps(capsys: pytest.CaptureFixture[str], step_s: float, left: str) -> None:
    assert left in shown(capsys, 10, done=0, steps=3, step_s=step_s)


def test_what_an_earlier_run_did_is_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "-:--:--" in shown(capsys, 60, done=50, steps=0, step_s=40.0)
    assert "0:04:40" in shown(capsys, 60, done=50, steps=3, step_s=40.0)


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One every ten seconds: short work prints nothing."""
    monkeypatch.delenv("FORCE_COLOR")
    clock = Clock()
    with progress_bar("asking", 30, "answers", get_time=clock) as advance:
        for number in range(1, 31):
            clock.now_s += 1.0
            advance(number)
    assert capsys.readouterr().err.splitlines() == [
        "asking: 10 of 30 answers, 0:00:20 left",
        "asking: 20 of 30 answers, 0:00:10 left",
        "asking: 30 of 30 answers",
    ]
    with progress_bar("asking", 60, "answers", done=50, get_time=clock) as advance:
        advance(50)
        clock.now_s += 10.0
        advance(50)
        clock.now_s += 10.0
        advance(54)
    assert capsys.readouterr().err.splitlines() == [
        "asking: 50 of 60 answers",
        "asking: 54 of 60 answers, 0:00:30 left",
    ]
    with progress_bar("fetching", None, get_time=clock) as advance:
        clock.now_s += 9.0
        advance(1e6)
        clock.now_s += 2.0
        advance(2.4e6)
    assert capsys.readouterr().err.splitlines() == ["fetching: 2 MB"]
