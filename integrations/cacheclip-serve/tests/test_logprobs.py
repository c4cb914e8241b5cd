"""How tokens and their probabilities are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from cacheclip_serve.replies import ChatReply, CompletionReply

from cacheclip_rag import TokenLogprob
from cacheclip_rag.answering.decoding import _logprobs
from cacheclip_rag.models import load_model


def test_bytes_are_those_of_the_text(tiny_models: dict[str, str]) -> None:
    """Of parts of characters too, beside the other tokens at their place."""
    runtime: Any = load_model(tiny_models["llama"])
    text = "a🗼 한국é\n"
    ids = list(runtime.tokenize(text).ids)
    likeliest = [ids[0], runtime.tokenizer.convert_tokens_to_ids("<|im_end|>"), ids[1], ids[2], 10**6]
    pairs = [(token, -0.1 * number) for number, token in enumerate(likeliest)]
    recorded = SimpleNamespace(recorded=[[(token, -1.0), *pairs] for token in ids])
    found = _logprobs(cast("Any", recorded), runtime, runtime.decode_ids)
    chat: Any = ChatReply("m")._tokens(found)["content"]
    assert bytes(byte for each in chat for byte in each["bytes"]).decode() == text
    own, end = list("🗼".encode()), {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    for each in chat:
        others = [other["bytes"] for other in each["top_logprobs"]]
        assert others == [[97], end["bytes"], own[:1], own[1:2], list(b"token_id:1000000")]
        assert each["top_logprobs"][1].items() >= end.items()
    completion = CompletionReply("m")._tokens(found)
    spelt = [rf"bytes:\x{byte:02x}" for byte in own]
    assert completion["tokens"][:6] == ["a", *spelt, " "]
    assert [len(each) for each in completion["top_logprobs"]] == [5] * len(ids)
    assert [*completion["top_logprobs"][0]] == ["a", "<|im_end|>", *spelt[:2], "token_id:1000000"]
    at = completion["text_offset"]
    assert at[:6] == [0, 1, 1, 1, 1, 2]
    whole = [(token, start) for token, start in zip(completion["tokens"], at, strict=True) if token[:6] != "bytes:"]
    assert all(text.startswith(token, start) for token, start in whole) and whole[-1] == ("\n", len(text) - 1)


def test_two_tokens_with_one_text() -> None:
    found = TokenLogprob("a", -1.0, (("a", -1.0), ("a", -2.0), ("b", -3.0)), b"a", (b"a", b"a", b"b"))
    (named,) = CompletionReply("m")._tokens([found])["top_logprobs"]
    assert named == {"a": -1.0, r"bytes:\x61": -2.0, "b": -3.0}
