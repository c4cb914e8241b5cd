"""Metrics of the benchmarks, so that figures can be compared with published figures.

Sources are LongBench (arXiv:2308.14508, ``metrics.py`` of its repository), SQuAD (arXiv:1606.05250) and RULER
(arXiv:2404.06654). All metrics return 0 to 1; the papers print percent. If only the first line of an output counts, cut
it before.
"""

from __future__ import annotations

import logging
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from cacheclip_rag import ConfigurationError, MissingExtraError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CONTROL = re.compile(r"[\x00-\x1f]")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
"""Kana and Chinese characters: scripts without spaces between words."""
_EAST_ASIAN = re.compile("[\u3000-\u303f\uff01-\uff65]|" + _UNSPACED.pattern)
"""Kana, Chinese characters, and the punctuation and wide letters among them."""
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CHINESE_PUNCTUATION = (
    "\uff01\uff1f\uff61\u3002\uff02\uff03\uff04\uff05\uff06\uff07\uff08\uff09\uff0a\uff0b\uff0c\uff0d\uff0f\uff1a\uff1b"
    "\uff1c\uff1d\uff1e\uff20\uff3b\uff3c\uff3d\uff3e\uff3f\uff40\uff5b\uff5c\uff5d\uff5e\uff5f\uff60\uff62\uff63\uff64"
    "\u3001\u3003\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u3014\u3015\u3016\u3017\u3018\u3019\u301a\u301b\u301c"
    "\u301d\u301e\u301f\u3030\u303e\u303f\u2013\u2014\u2018\u2019\u201b\u201c\u201d\u201e\u201f\u2026\u2027\ufe4f."
)
"""LongBench's list of punctuation. Like LongBench's, it lacks the left title mark (U+300A)."""
_LONGBENCH_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)
_ALL_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION + "\u3008\u3009\u300a")


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction is an answer, both normalised as for :func:`token_f1`, else 0 (SQuAD).

    In Chinese and Japanese, white space and Chinese punctuation do not count either (``北京。`` is ``北京``).
    """
    return _best(_exact, prediction, answers)


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Bag-of-words F1 of lower-cased words without ASCII punctuation and a/an/the: ``qa_f1`` of LongBench, from SQuAD.

    Normalised in this order: lower-case, delete punctuation (``U.S.`` is ``us``), delete articles, split at spaces.
    """
    return _best(lambda p, a: _bag_f1(_normalise(p).split(), _normalise(a).split()), prediction, answers)


def token_f1_zh(prediction: str, answers: Sequence[str]) -> float:
    """F1 over words found by jieba, without ASCII and Chinese punctuation: LongBench's ``qa_f1_zh``.

    Raises:
        MissingExtraError: jieba is not installed.
    """
    return _best(lambda p, a: _bag_f1(_chinese_words(p), _chinese_words(a)), prediction, answers)


def contains(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction contains an answer as whole words, both normalised as for :func:`token_f1`, else 0.

    Text around a right answer has no effect, unlike in F1. In Chinese and Japanese, which have no spaces, an answer
    counts anywhere, and white space and Chinese punctuation are ignored.
    """
    return _best(_contains, prediction, answers)


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, in any case, even inside a word (RULER)."""
    _check_answers(answers)
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "f1": token_f1,
    "f1_zh": token_f1_zh,
    "string_match_all": string_match_all,
    "contains": contains,
    "em": exact_match,
}
"""Function by its name in results and reports."""
ALL_WANTED = frozenset({"string_match_all"})
"""Metrics that require all right answers; for the others, any right answer counts."""


def check_metric(name: str) -> None:
    """Raise ConfigurationError, listing the known metrics, unless ``name`` is one of them."""
    if name not in METRICS:
        raise ConfigurationError(f"metric must be one of {', '.join(METRICS)}, got {name!r}.")


def _best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    _check_answers(answers)
    return max(score(prediction, answer) for answer in answers)


def _check_answers(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise ConfigurationError(f"expected a list of at least one right answer, got {answers!r}.")


def _normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split())


def _exact(prediction: str, answer: str) -> float:
    if any(map(_EAST_ASIAN.search, (prediction, answer))):
        left, right = (_squeeze(text, _ALL_PUNCTUATION) for text in (prediction, answer))
    else:
        left, right = _normalise(prediction), _normalise(answer)
    if not right:
        # nothing but articles and punctuation ("The", "?"): an empty prediction must not match that
        left, right = prediction.strip().lower(), answer.strip().lower()
    return float(left == right)


def _contains(prediction: str, answer: str) -> float:
    if _UNSPACED.search(answer):
        return float(_squeeze(answer, _ALL_PUNCTUATION) in _squeeze(prediction, _ALL_PUNCTUATION))
    wanted = _normalise(answer)
    if not wanted:
        return _exact(prediction, answer)
    return float(re.search(rf"(?<!\w){re.escape(wanted)}(?!\w)", _normalise(prediction)) is not None)


def _squeeze(text: str, deleted: Mapping[int, int | None]) -> str:
    return "".join(text.lower().translate(deleted).split())


def _chinese_words(text: str) -> list[str]:
    return [word for token in _jieba().cut(text) if (word := _squeeze(token, _LONGBENCH_PUNCTUATION))]


@cache
def _jieba() -> Any:
    try:
        with warnings.catch_warnings():
            # its source gives warnings where it is compiled, and where setuptools is new
            warnings.simplefilter("ignore")
            jieba = import_module("jieba")
    except ImportError as error:
        raise MissingExtraError("jieba (for Chinese F1)", "lab") from error
    jieba.setLogLevel(logging.WARNING)  # otherwise it logs the loading time of its dictionary
    return jieba


def _bag_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    shared = (Counter(prediction) & Counter(answer)).total()
    return 2 * shared / (len(prediction) + len(answer)) if shared else 0.0
