"""What models write around calls of tools and around reasoning, in text or as special tokens."""

from __future__ import annotations

from collections.abc import Mapping

CALL_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
"""What models write around calls of tools. In some tokenizers these are special tokens, which the text of an answer
lacks."""

REASONING_MARKERS = (
    ("<think>", "</think>"),  # Qwen 3, DeepSeek R1, GLM 4.5, SmolLM 3
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("◁think▷", "◁/think▷"),  # Kimi VL
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|channel|>analysis<|message|>", "<|end|>"),  # GPT-OSS, whose answers are messages, each in a channel
    ("<|channel|>commentary<|message|>", "<|end|>"),  # what it says before calls
)
"""What models write before and after reasoning. Special tokens in some tokenizers, too."""

CHANNEL_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
"""Special tokens of models that answer in channels."""
_CHANNELS = ("<|channel|>", "<|channel>")
"""Special tokens that begin reasoning, with a word after them: GPT-OSS's, and Gemma 4's."""


def markers_among(special: Mapping[int, str]) -> dict[int, str]:
    """Those of a tokenizer's special tokens that mark calls, reasoning or channels, by their ids."""
    known = {*CALL_MARKERS, *_CHANNELS[1:], *(marker for pair in REASONING_MARKERS for marker in pair)} - {"<|end|>"}
    if "<|channel|>" in special.values():  # in other tokenizers, some of their names mean something else
        known.update(CHANNEL_MARKERS)
    return {token: text for token, text in special.items() if text in known}


def known_reasoning(template: object, markers: Mapping[int, str]) -> tuple[bool, tuple[str, ...]]:
    """Whether some of the special tokens that are ``markers`` are for reasoning; and the markers that end it, of those
    that they or the chat template (or one of several by name) know. GPT-OSS's ends other messages, too."""
    marks = not {*_CHANNELS, *(opening for opening, _ in REASONING_MARKERS)}.isdisjoint(markers.values())
    known = f"{template}{[*markers.values()]}"
    return marks, tuple(dict.fromkeys(end for _, end in REASONING_MARKERS if end in known and end != "<|end|>"))
