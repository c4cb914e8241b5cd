"""Kimi's folders: a class of transformers under another name, and a tokenizer that lies there as a file of tiktoken."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cacheclip_testing import build_class, tiny_of_class

from cacheclip_rag import ModelError
from cacheclip_rag.models.load import load_model, load_tokenizer
from cacheclip_rag.runtime.transformers import tiktoken_file

TOKENS = [bytes([number]) for number in range(256)] + [b"th", b" th", b"the", b" the", "\u6f22".encode()]
FIRST = len(TOKENS)
CONTROL = {"0": ("[BOS]", True), "2": ("<|im_end|>", True), "9": ("<|tool_call_begin|>", False)}


def kimi(folder: Path, **more: Any) -> Path:
    """A tiny DeepSeek-V3 in the form of Kimi-K2's folder, with code that says if it is run."""
    build_class(folder, "deepseek_v3", vocab_size=600)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink(missing_ok=True)
    lines = (b"%s %d\n" % (base64.b64encode(token), number) for number, token in enumerate(TOKENS))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    control = {FIRST + int(n): {"content": name, "special": special} for n, (name, special) in CONTROL.items()}
    settings = {
        **{"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": {"content": "<|im_end|>"}},
        **{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "added_tokens_decoder": control},
        **{"chat_template": "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}", **more},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text("raise SystemExit('code of a folder was run')")
    config = json.loads((folder / "config.json").read_text())
    named = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps({**config, **named}))
    return folder


def test_its_model_is_run_by_transformers_own_class(tmp_path: Path) -> None:
    ids = torch.tensor([[5, 99, 260, 7]])
    plain = tiny_of_class("deepseek_v3", vocab_size=600)
    model = load_model(kimi(tmp_path)).model
    assert type(model) is type(plain)
    assert torch.allclose(model(input_ids=ids).logits, plain(input_ids=ids).logits, atol=1e-5)


def test_texts_are_divided_and_merged_as_by_tiktoken(tmp_path: Path) -> None:
    folder = kimi(tmp_path)
    tokenizer = tiktoken_file.read_tokenizer(folder)
    words = ["don't", " the", "\u6f22\u5b57", "Kana", " x", "123", "45", "//\n", " ", " \u00e9t\u00e9"]
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("".join(words))
    assert ["".join(words)[start:stop] for _, (start, stop) in pieces] == words
    assert tokenizer.encode(" the\u6f22 oth", add_special_tokens=False) == [
        *(TOKENS.index(token) for token in (b" the", "\u6f22".encode(), b" ", b"o", b"th"))
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (FIRST, FIRST + 2, FIRST + 256)
    written = tokenizer.encode("<|im_end|>a<|tool_call_begin|><|reserved_token_266|>")
    assert written == [FIRST + 2, ord("a"), FIRST + 9, 266]
    assert tokenizer.decode(written, skip_special_tokens=True) == "a<|tool_call_begin|>"
    assert load_tokenizer(str(folder), dtype="float32", device="cpu")("the") == [TOKENS.index(b"the")]


@pytest.mark.parametrize("number", [FIRST - 1, FIRST + 256])
def test_control_tokens_elsewhere_are_an_error(number: int, tmp_path: Path) -> None:
    folder = kimi(tmp_path, added_tokens_decoder={number: {"content": "<|im_end|>"}})
    with pytest.raises(ModelError, match=r"tiktoken.model is missing, damaged.*do not fit each other"):
        load_model(folder)
