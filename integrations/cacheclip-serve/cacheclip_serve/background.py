"""Questions for whose answers no user waits, such as a title for a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OPEN_WEBUI = re.compile(
    r"\s*### Task:\s*(?:Generate a concise(?:, \d| title summarizing the chat)|Generate \d+-\d+ broad tags"
    r"|Suggest \d+-\d+ relevant follow-up|Predict \d+-\d+ useful messages)"
)
"""How its prompts for titles, tags and follow-up questions begin, in 0.6 and 0.12. A user waits for what it asks before
it searches, and for its answers from documents, which begin with a task too."""


def in_background(stated: bool | None, prompt: Any) -> bool:
    """Whether a question waits behind others: as its request says, else by the last of its messages."""
    if stated is not None:
        return stated
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(content, str) and _OPEN_WEBUI.match(content) is not None
