"""Moved KV in vLLM: that of the core, never in vLLM's prefix cache, and plain prefill where it is gone."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from cacheclip_testing import SENTENCES
from cacheclip_vllm import kept
from cacheclip_vllm.kept import GONE
from cacheclip_vllm.offline import FusedLLM, engine_options
from vllm_engines import CHUNKS, Setting, ask, outcomes, outputs, sampling, started

from cacheclip_rag import CacheClipEngine

GENERATOR = random.Random(5)
WORDS = sorted({*" ".join(SENTENCES).split()})
PASSAGES = [" ".join(GENERATOR.sample(WORDS, 40)) for _ in range(5)]
ROOM = 2**28
TRANSFER = "kv_transfer_config"


def chat(header: str, passages: list[str] = PASSAGES) -> str:
    return header + "\n\n" + "\n\n".join(passages) + "\n\nQuestion: What is the magic number?"


OLD, NEW = chat("Checksum a91f3."), chat("Checksum 07c2e, longer.")
BOTH = chat("Checksum 07c2e.", [*PASSAGES[:-1], CHUNKS[0], PASSAGES[-1]])


@pytest.fixture(scope="module")
def setting(settings: dict[str, Setting]) -> Setting:
    return settings()  # type: ignore[operator]


@pytest.fixture(scope="module")
def engine(setting: Setting) -> Iterator[FusedLLM]:
    with started(setting, **{TRANSFER: engine_options(setting.store, prompt_bytes=ROOM)[TRANSFER]}) as found:
        found.planner = setting.planner(prefix_cache_bytes=ROOM)
        found.planner.keep_prompts()
        yield found


@pytest.fixture
def fused(engine: FusedLLM) -> FusedLLM:
    assert engine.llm.reset_prefix_cache()
    engine.plain.clear()
    engine.planner.kept.forget()
    engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._kept.clear()
    return engine


def moved(setting: Setting, old: str, new: str) -> torch.Tensor:
    """Logarithms of the first token's probabilities of an engine of ours, which moves the KV of the same prompt."""
    ours = CacheClipEngine(**{**setting.options, "prefix_cache_bytes": ROOM, "on_miss": "ignore"})
    ids = ours.plan(old).layout.token_ids
    with torch.inference_mode():
        ours.prefixes.insert(ids, ours.primary.prefill(torch.tensor(ids), len(ids))[0])
    found = ours.prefill(new)
    assert found.stats.moved_tokens > len(ids) / 2
    return found.logits.log_softmax(-1)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("new", [NEW, BOTH], ids=["header", "beside a stored chunk"])
def test_the_answer_of_the_core(
    fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch, new: str, planted: bool
) -> None:
    """Planted: blocks hold the KV of the tokens before theirs."""
    if planted:
        cut = kept.cut
        wrong = "cacheclip_vllm.connector.cut"
        monkeypatch.setattr(wrong, lambda kv, rows, runtime: cut(kv.roll(1, 3), rows, runtime))
    ask(fused, [OLD], "full", tokens=1)
    (found,) = fused.generate([new], sampling(logprobs=20), use_tqdm=False)
    assert outcomes([found]) == ["fused"] and not fused.plain
    expected = moved(setting, OLD, new)
    far = max(abs(each.logprob - float(expected[n])) for n, each in found.outputs[0].logprobs[0].items())
    assert (far < 1e-3) is not planted, far


def test_it_never_enters_vllms_prefix_cache(fused: FusedLLM, setting: Setting) -> None:
    """The same prompt, to be answered plainly, finds nothing of it."""
    ask(fused, [OLD], "full", tokens=1)
    assert outcomes(outputs(fused, [NEW], None)) == ["fused"]
    (plain,) = outputs(fused, [NEW], "full")
    assert plain.num_cached_tokens <= 32 and [tuple(plain.outputs[0].token_ids)] == setting.expected([NEW], "full")


def test_only_what_vllm_computes_is_kept(fused: FusedLLM) -> None:
    """A prompt whose first tokens vLLM has in its own cache leaves the others, which join those before."""
    ask(fused, [OLD[: len(OLD) // 2] + " Who?"], "full", tokens=1)
    ask(fused, [OLD], "full", tokens=1)
    stats = fused.planner.plan(NEW).stats
    assert stats.moved_tokens > 0.7 * stats.prompt_tokens
    assert outcomes(outputs(fused, [NEW], None)) == ["fused"]


def test_what_is_gone_is_plain_prefill(fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(fused, [OLD], "full", tokens=1)
    with monkeypatch.context() as patched:
        patched.setattr(kept.KeptBlocks, "holds", lambda *_: False)
        (found,) = outputs(fused, [NEW], None)
    assert outcomes([found]) == ["plain"] and fused.plain == {GONE: 1}
    assert [tuple(found.outputs[0].token_ids)] == setting.expected([NEW], "full")
    assert outcomes(outputs(fused, [chat("Checksum 3.")], None)) == ["fused"], "what was computed instead is kept"


def test_a_worker_that_lost_it(fused: FusedLLM, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheclip_vllm.connector.cut", lambda *_: {})
    old, new = chat("Checksum 1.", PASSAGES[::-1]), chat("Checksum 2.", PASSAGES[::-1])
    ask(fused, [old], "full", tokens=1)
    (found,) = outputs(fused, [new], None)
    assert outcomes([found]) == ["plain"]
    assert [tuple(found.outputs[0].token_ids)] == setting.expected([new], "full")
    assert fused.planner.plan(new).fusion is None


def test_switched_off(fused: FusedLLM, setting: Setting) -> None:
    ask(fused, [OLD], "full", tokens=1)
    assert ask(fused, [NEW], None, moved="off") == setting.expected([NEW], "full")
