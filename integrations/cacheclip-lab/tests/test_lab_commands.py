"""Commands of the laboratory as scripts use them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from cacheclip_lab import demonstration
from cacheclip_lab.commands.common import measured

from cacheclip_rag import ConfigurationError, DownloadError, EngineConfig
from cacheclip_rag.plugins import CommandSettings


def test_models_list(cacheclip: Any) -> None:
    names = [m["name"] for m in cacheclip("models", "list", "--json").json["models"]]
    assert {"smollm2-135m", "qwen2.5-coder-0.5b", "all-MiniLM-L6-v2"} <= set(names)
    assert "smollm2-135m" in cacheclip("models", "list").out


def test_the_demo_compares_methods_on_its_own_documents(
    cacheclip: Any, tiny_models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (settings := tmp_path / "settings.toml").write_text(f"auxiliary = {json.dumps(tiny_models['auxiliary'])}")
    monkeypatch.setattr("cacheclip_rag.guards.certificates.UNMEASURED_CONFIDENCE", 0.0)  # a tiny model is never sure
    pair = ("--primary", tiny_models["llama"], "--settings", settings)
    texts = demonstration.documents()
    assert len(texts) == 6 and all(300 < len(text.split()) < 400 for text in texts)
    monkeypatch.setattr(demonstration, "documents", lambda: [text[:100] for text in texts])
    result = cacheclip("demo", *pair, "--json")
    assert result.code == 0, result.err
    full, *reusing = result.json["methods"].values()
    assert (full["sooner"], full["same_answers"], full["reused_tokens"]) == (1.0, 3, 0)
    assert [each["method"] for each in result.json["methods"].values()] == ["full", "direct", "epic-corrected"]
    assert all(0.6 < each["reused_tokens"] / each["prompt_tokens"] < 1 for each in reusing)
    page = tmp_path / "new" / "answer.html"
    shown = cacheclip("demo", *pair, "--inspect", page).out
    assert shown.count("first token after") == 9 and "3 of 3" in shown and page.as_uri() in shown
    assert 0 < shown.index("1 of 1") < shown.index(demonstration.QUESTIONS[1]), "the first table comes first"
    assert "<title>What is the bakery" in page.read_text()


def test_an_error_of_the_demo_does_not_wait_for_the_other_model(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, ended = threading.Event(), threading.Event()

    def fetch(name: str) -> None:
        go.wait(2)
        ended.set()
        raise DownloadError("the load says it again")

    monkeypatch.setattr(demonstration, "fetch_parts", fetch)
    with pytest.raises(DownloadError, match="gone/model"):
        next(demonstration.demonstrate(EngineConfig(primary="gone/model", auxiliary=tiny_models["auxiliary"])))
    assert not ended.is_set()
    go.set()
    assert ended.wait(2)


def test_each_prompt_of_the_demo_is_compared_with_its_own_prefill() -> None:
    """Longer prompts are no spread, and a method that fell back has a row of its own."""
    times = {"full": (10, 20, 40), "direct": (1, 2, 4), "auto": (2, 20, 8)}
    plain = {"method": "full", "text": ""}
    answered = [{name: {**plain, "ttft_s": seconds[n]} for name, seconds in times.items()} for n in range(3)]
    rows = demonstration.table(answered)
    assert [(row["ttft_s"], row["sooner"]) for row in rows.values()] == [(20, 1.0), (2, 10.0), (8, 5.0)]


def test_bench_prints_one_object(cacheclip: Any, tiny_models: dict[str, str]) -> None:
    result = cacheclip(
        *("bench", "--primary", tiny_models["llama"], "--auxiliary", tiny_models["auxiliary"]),
        *("--context-tokens", "256", "--chunk-tokens", "64", "--runs", "1", "--json"),
    )
    assert result.code == 0, result.err
    assert list(result.json["methods"]) == ["full", "direct", "epic-corrected"]
    assert len(result.out.splitlines()) == 1


def test_bench_shows_all_three_ratios(
    cacheclip: Any, tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    result = cacheclip(
        *("bench", "--primary", tiny_models["llama"], "--auxiliary", "none", "--methods", "full,epic"),
        *("--context-tokens", "256", "--chunk-tokens", "64", "--runs", "1"),
    )
    assert all(f" {title} " in result.out for title in ("nominal", "effective", "charged"))
    [row] = [line for line in result.out.splitlines() if " epic " in line]
    _, _, _, _, _, _, _, nominal, effective, charged, *_ = (cell.strip() for cell in row.split("│"))
    assert (nominal, effective) == ("0.200", "0.200") and charged == effective


def test_bench_without_an_auxiliary(cacheclip: Any, tiny_models: dict[str, str]) -> None:
    """Its model is not even looked for unless a method needs it; a method that does is refused before any work."""
    bench = ("bench", "--primary", tiny_models["llama"], "--runs", "1", "--json")
    sizes = ("--context-tokens", "64", "--chunk-tokens", "32")
    result = cacheclip(*bench, *sizes, "--auxiliary", "nobody/no-such", "--methods", "full,direct")
    assert list(result.json["methods"]) == ["full", "direct"]
    refused = cacheclip(*bench, *sizes, "--auxiliary", "none", "--methods", "full,cacheclip")
    assert refused.code == 2 and "full, prefix, direct" in refused.err and refused.out == ""


def test_what_is_measured_is_not_what_a_service_needs() -> None:
    service = {"store": "s", "max_bytes": 9, "require_certificate": True, "finish": "revise", "min_confidence": 0.5}
    given = CommandSettings({**service, "codec": "int8"})
    assert measured(given, recompute_ratio=0.3) == EngineConfig(codec="int8", recompute_ratio=0.3)
    assert given.config().finish == "revise"
    with pytest.raises(ConfigurationError, match="must be a number to be measured, got 'auto'"):
        measured(CommandSettings({"recompute_ratio": "auto"}))
