"""Answer metrics against values worked out by hand."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cacheclip_lab.evaluation import scores
from cacheclip_lab.evaluation.scores import METRICS, contains, exact_match, token_f1, token_f1_zh

from cacheclip_rag import ConfigurationError, MissingExtraError


@pytest.mark.parametrize(
    ("prediction", "answers", "f1", "em"),
    [
        ("Exeter College", ["Exeter College"], 1.0, 1.0),
        ("The  Exeter, college!", ["exeter college"], 1.0, 1.0),
        ("It was Exeter College.", ["Exeter College"], 2 * 2 / (4 + 2), 0.0),
        ("the cat the cat", ["cat"], 2 * 1 / (2 + 1), 0.0),
        ("theatre", ["atre"], 0.0, 0.0),
        ("U.S.", ["US"], 1.0, 1.0),
        ("well-known", ["well known"], 0.0, 0.0),
        ("blue", ["red", "deep blue"], 2 * 1 / (1 + 2), 0.0),
        ("", ["red"], 0.0, 0.0),
        ("", ["The"], 0.0, 0.0),
        ("the", ["The"], 0.0, 1.0),
    ],
)
def test_token_f1_and_exact_match(prediction: str, answers: list[str], f1: float, em: float) -> None:
    assert token_f1(prediction, answers) == pytest.approx(f1)
    assert exact_match(prediction, answers) == em


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("小明毕业于中国科学院。", ["小明毕业于中国科学院"], 1.0),
        ("小明硕士毕业于中国科学院", ["小明毕业于中国科学院"], 2 * 4 / (5 + 4)),
        ("北京。", ["上海", "北京"], 1.0),
        ("2019年", ["2019 年"], 1.0),
        ("", ["北京"], 0.0),
    ],
)
def test_chinese_f1(prediction: str, answers: list[str], expected: float, capsys: pytest.CaptureFixture[str]) -> None:
    assert token_f1_zh(prediction, answers) == pytest.approx(expected)
    assert capsys.readouterr() == ("", "")


def test_chinese_f1_says_how_to_get_jieba(monkeypatch: pytest.MonkeyPatch) -> None:
    scores._jieba.cache_clear()
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(MissingExtraError, match="pip install -e './integrations/cacheclip-lab'"):
        token_f1_zh("北京", ["北京"])


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("北京。", ["上海", "北京"], 1.0),
        ("《红楼梦》", ["红楼梦"], 1.0),
        ("2019 年", ["2019年。"], 1.0),
        ("2019。", ["2019"], 1.0),
        ("在北京。", ["北京"], 0.0),
        ("。", ["北京"], 0.0),
        ("", ["。"], 0.0),
    ],
)
def test_chinese_exact_match(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("It was built by the Exeter College, in 1314.", "exeter college", 1.0),
        ("He answered \u201cExeter College\u201d\u2014twice.", "Exeter College", 1.0),
        ("He was born in 1985.", "198", 0.0),
        ("concatenate", "cat", 0.0),
        ("C++ (the language)", "C++", 1.0),
        ("no", "yes", 0.0),
        ("no", "The", 0.0),
        ("", "The", 0.0),
        ("他在清华大学读书", "清华 大学", 1.0),
        ("红楼梦的作者", "《红楼梦》", 1.0),
        ("他在北京大学读书", "清华大学", 0.0),
    ],
)
def test_contains(prediction: str, answer: str, expected: float) -> None:
    assert contains(prediction, [answer]) == expected
    assert contains(prediction, ["zebra", answer]) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        (" 1234567 and 7654321.", ["1234567", "7654321"], 1.0),
        ("1234567", ["1234567", "7654321", "1111111", "2222222"], 0.25),
        ("ABC-DEF", ["abc-def"], 1.0),
        ("12345678", ["1234567"], 1.0),
        ("a\tb", ["a\nb"], 1.0),
        ("", ["1234567"], 0.0),
    ],
)
def test_string_match_all(prediction: str, answers: list[str], expected: float) -> None:
    assert scores.string_match_all(prediction, answers) == expected


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_a_share_and_wants_a_list_of_answers(name: str) -> None:
    metric: Any = METRICS[name]
    scores.check_metric(name)
    assert metric("the harbour of Brindle", ["the harbour of Brindle"]) == 1.0
    assert 0.0 <= metric("harbour, of: Brindle Point.", ["a harbour", "Brindle"]) <= 1.0
    wrong: list[Any] = [[], "harbour"]
    for answers in wrong:
        with pytest.raises(ConfigurationError, match="at least one right answer"):
            metric("harbour", answers)


def test_unknown_metrics_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match="f1, f1_zh, string_match_all, contains, em, got 'bleu'"):
        scores.check_metric("bleu")
