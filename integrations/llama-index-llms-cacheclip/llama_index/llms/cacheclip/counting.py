"""LlamaIndex counts tokens with a tokenizer that the whole process shares; by default, an old one of OpenAI. By that
one's count, German text or a table that is packed to the model's context exceeds it by a third."""

from __future__ import annotations

from functools import partial

import llama_index.core
from llama_index.core.utils import set_global_tokenizer

from cacheclip_rag.adapters import Tokenizer


def count_with(tokenizer: Tokenizer) -> None:
    """Let what LlamaIndex makes from now on count with ``tokenizer``, unless the user has set another one.

    Packing (``PromptHelper``) takes the shared tokenizer when it is made, right after it has asked for the model's
    metadata. So each model's prompts are counted by its own.
    """
    current = llama_index.core.global_tokenizer
    if current is None or isinstance(current, Tokenizer) or _is_default(current):
        set_global_tokenizer(tokenizer)


def _is_default(current: object) -> bool:
    """Whether LlamaIndex chose it (``llama_index.core.utils.get_tokenizer``)."""
    owner = type(getattr(getattr(current, "func", None), "__self__", None))
    return isinstance(current, partial) and owner.__module__.partition(".")[0] == "tiktoken" and not current.args
