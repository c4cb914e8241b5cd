"""Kimi's tokenizers, read without the Python code that lies beside them.

Their folders have no ``tokenizer.json`` but a file of tiktoken (https://github.com/openai/tiktoken): a line a token,
its bytes in base64 and its number. Numbers behind them are reserved for control tokens, which
``tokenizer_config.json`` names. Transformers makes a fast tokenizer of both, given the pattern that divides texts into
words.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

TIKTOKEN_FILE = "tiktoken.model"
_CLASS = "TikTokenTokenizer"
_RESERVED = 256
"""Numbers behind those of texts."""
_MARKS, _BEGIN, _END = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_HIGH, _LOW = rf"[\p{{Lu}}\p{{Lt}}{_MARKS}]", rf"[\p{{Ll}}{_MARKS}]"
_WORDS = "|".join(
    [
        r"[\p{Han}]+",
        *(f"{_BEGIN}{_HIGH}{high}{_LOW}{low}{_END}" for high, low in (("*", "+"), ("+", "*"))),
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
"""As o200k of tiktoken, with Chinese apart, and without slashes behind signs."""


class _Converter(TikTokenConverter):  # type: ignore[misc]
    @staticmethod
    def load_tiktoken_bpe(file: str) -> dict[bytes, int]:
        lines = (line.split() for line in Path(file).read_bytes().splitlines() if line)
        return {base64.b64decode(token, validate=True): int(number) for token, number in lines}


def is_of_kimi(folder: Path) -> bool:
    """Whether a model's folder has such a tokenizer alone."""
    settings = folder / "tokenizer_config.json"
    has_files = (folder / TIKTOKEN_FILE).is_file() and settings.is_file() and not (folder / "tokenizer.json").exists()
    return has_files and json.loads(settings.read_text(encoding="utf-8")).get("tokenizer_class") == _CLASS


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder. Raises ValueError, KeyError or OSError: a file is damaged."""
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {int(number): token for number, token in settings["added_tokens_decoder"].items()}
    tokenizer = _Converter(str(folder / TIKTOKEN_FILE), pattern=_WORDS, extra_special_tokens=[]).converted()
    numbers = range(first := tokenizer.get_vocab_size(), first + _RESERVED)
    control = [named.get(number, {"content": f"<|reserved_token_{number}|>"}) for number in numbers]
    tokenizer.add_tokens(
        [AddedToken(each["content"], normalized=False, special=each.get("special", True)) for each in control]
    )
    if not named.keys() <= {*numbers} or tokenizer.get_vocab_size() != numbers.stop:
        raise ValueError(f"{TIKTOKEN_FILE} and the control tokens of tokenizer_config.json do not fit each other")
    template = folder / "chat_template.jinja"
    names = {key: settings[key] for key in ("bos_token", "eos_token", "pad_token", "unk_token") if settings.get(key)}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template"),
        **{key: each["content"] if isinstance(each, dict) else each for key, each in names.items()},
    )
