"""What long work says of itself, on a clock of its own."""

from typing import Any

import pytest

from cacheclip_rag.base.progress import progress_bar


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def shown(capsys: pytest.CaptureFixture[str], total: int, *, done: int, steps: int, step_s: float) -> str:
    """What stands behind the name of a bar that is left after so many steps."""
    now = [1000.0]
    with progress_bar("asking", total, "answers", done=done, get_time=lambda: now[0]) as advance:
        for number in range(1, steps + 1):
            now[0] += step_s
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
    now = [1000.0]

    def lines_of(bar: Any, *steps: tuple[float, float]) -> list[str]:
        with bar as advance:
            for seconds, done in steps:
                now[0] += seconds
                advance(done)
        return capsys.readouterr().err.splitlines()

    time: Any = {"get_time": lambda: now[0]}
    assert lines_of(progress_bar("asking", 30, "answers", **time), *((1.0, n) for n in range(1, 31))) == [
        "asking: 10 of 30 answers, 0:00:20 left",
        "asking: 20 of 30 answers, 0:00:10 left",
        "asking: 30 of 30 answers",
    ]
    resumed = progress_bar("asking", 60, "answers", done=50, **time)
    expected = ["asking: 50 of 60 answers", "asking: 54 of 60 answers, 0:00:30 left"]
    assert lines_of(resumed, (0.0, 50), (10.0, 50), (10.0, 54)) == expected
    begun = progress_bar("fetching", 491e6, **time)
    assert lines_of(begun, (10.0, 1e3)) == ["fetching: 0 of 491 MB"], "a wait for the first byte is no speed"
    assert lines_of(progress_bar("fetching", None, **time), (9.0, 1e6), (2.0, 2.4e6)) == ["fetching: 2 MB"]
