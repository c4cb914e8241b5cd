"""A prompt as segments: text whose KV the store may hold, and text that must be computed now.

Every prompt, from any framework or command, becomes a list of segments. Joined, they are the prompt's text, which is
tokenised as a whole (:mod:`cacheclip_rag.prompt.layout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..errors import ConfigurationError
from ..types import Documents, Message, Prompt

if TYPE_CHECKING:
    from ..runtime.base import Runtime, TokenizedText
    from ..store.texts import TextIndex

__all__ = [
    "Chunk",
    "Fresh",
    "PromptReader",
    "Segment",
    "as_segments",
    "check_messages",
    "check_segments",
    "chunk_texts",
    "given_texts",
    "normalise_chunk",
    "segment_chat",
    "segment_text",
    "tokenize_whole",
    "without_parts",
]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Text whose KV is computed for this prompt: template, text between chunks, question."""

    text: str
    control: bool = False
    """True for text of the chat template, in which names of special tokens become special tokens."""
    apart: bool = False
    """True: the text is tokenised apart from what comes after it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A retrieved text, or a part of one, exactly as the model reads it. The KV of the whole text is in the store, or
    will be stored after this answer."""

    text: str
    of: str | None = None
    """The whole text of which ``text`` is a part; None: ``text`` is the whole."""
    at: int = 0
    """Where the part begins in ``of``, in characters."""
    control: ClassVar[bool] = False
    apart: ClassVar[bool] = False

    @property
    def whole(self) -> str:
        """The text that is stored."""
        return self.text if self.of is None else self.of


Segment = Fresh | Chunk


def normalise_chunk(text: str) -> str:
    """A chunk's text without surrounding white space, because frameworks strip chunks before they paste them."""
    if not isinstance(text, str):
        raise ConfigurationError(f"a text must be a string, got {type(text).__name__}.")
    return text.strip()


def chunk_texts(texts: Iterable[str]) -> Iterator[str]:
    """Each text, normalised.

    Raises:
        ConfigurationError: ``texts`` is a single string, or holds something other than strings.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        found = "one string: put it in a list" if isinstance(texts, str) else type(texts).__name__
        raise ConfigurationError(f"expected a list of texts, got {found}.")
    return map(normalise_chunk, texts)


def given_texts(documents: Documents) -> list[str]:
    """The texts of documents that a caller gives with a prompt, normalised, each once, without empty ones."""
    return [text for text in dict.fromkeys(chunk_texts(documents)) if text]


def segment_text(text: str, index: TextIndex | None, documents: Iterable[str] = ()) -> list[Segment]:
    """Cut ``text`` into chunks (stored texts, ``documents``, and parts of them) and fresh text. Joined, they equal
    ``text``."""
    segments: list[Segment] = []
    position = 0
    for match in index.find(text, chunk_texts(documents)) if index is not None else ():
        if match.start > position:
            segments.append(Fresh(text[position : match.start]))
        segments.append(Chunk(text[match.start : match.stop], match.source, match.at))
        position = match.stop
    if position < len(text):
        segments.append(Fresh(text[position:]))
    return segments


def segment_chat(
    messages: Sequence[Message],
    render: Callable[[Sequence[Message]], str],
    index: TextIndex | None,
    documents: Iterable[str] = (),
    verbatim: Collection[str] = (),
) -> list[Segment]:
    """Segments of a chat: the template's text as control segments, each content cut by :func:`segment_text`.

    The template is rendered with a sentinel in place of each content, and split there. So the template cannot change
    contents, and no content can imitate the template. White space around a content does pass through the template,
    because some templates strip it. Contents in ``verbatim`` are not searched for chunks.
    """
    messages = check_messages(messages)
    documents = list(chunk_texts(documents))
    cores = [message["content"].strip() for message in messages]
    around = [m["content"].split(c, 1) if c else (m["content"], "") for m, c in zip(messages, cores, strict=True)]
    marked = [f"{lead}{_sentinel(n)}{trail}" for n, (lead, trail) in enumerate(around)]
    rendered = render([{**message, "content": text} for message, text in zip(messages, marked, strict=True)])
    pieces = _SENTINEL.split(rendered)
    for number in set(range(len(messages))) - set(map(int, pieces[1::2])):
        raise ConfigurationError(
            f"this model's chat template drops a message of role {messages[number]['role']!r}. Use roles it knows "
            "(usually system, user, assistant, in alternation), or pass the prompt as one string."
        )
    segments: list[Segment] = []
    for position in range(1, len(pieces), 2):
        number = int(pieces[position])
        text, (lead, trail) = cores[number], around[number]
        if lead and pieces[position - 1].endswith(lead):
            pieces[position - 1], text = pieces[position - 1].removesuffix(lead), lead + text
        if trail and pieces[position + 1].startswith(trail):
            pieces[position + 1], text = pieces[position + 1].removeprefix(trail), text + trail
        segments.append(Fresh(pieces[position - 1], control=True))
        whole = messages[number]["content"] in verbatim
        segments.extend([Fresh(text)] if whole else segment_text(text, index, documents))
    segments.append(Fresh(pieces[-1], control=True))
    return [segment for segment in segments if segment.text]


_SENTINEL = re.compile("\u2063cacheclip([0-9]+)\u2063")


def _sentinel(number: int) -> str:
    return f"\u2063cacheclip{number}\u2063"


_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a role may be: the chat template writes it as control text, so it must not hold names of control tokens."""


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages as a list, with role and content only: the chat template can write other fields as control text.

    Raises:
        ConfigurationError: a message lacks a role or a content string, its role is more than a word, or another field
            holds something.
    """
    if not messages:
        raise ConfigurationError("a chat prompt needs at least one message, got none.")
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigurationError(f"each message must be a dict, got {type(message).__name__}.")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ConfigurationError(
                "each message must be a dict with string 'role' and 'content', got "
                f"{ {k: type(v).__name__ for k, v in message.items()} }."
            )
        if not _ROLE.fullmatch(message["role"]):
            raise ConfigurationError(
                f"a role must be a word of letters, digits, '_' and '-' such as 'user', got {message['role'][:80]!r}. "
                "Names of control tokens are not accepted in roles."
            )
        others = sorted(str(key) for key, value in message.items() if key not in ("role", "content") and value)
        if others:
            raise ConfigurationError(
                f"a message has 'role' and 'content' only, got also {', '.join(map(repr, others))}. Write what the "
                "model should read into the content."
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def check_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Check segment types, drop empty segments, and turn white space around a chunk's text into fresh text.

    Raises:
        ConfigurationError: a segment is neither Fresh nor Chunk.
    """
    checked: list[Segment] = []
    for segment in segments:
        if not isinstance(segment, Fresh | Chunk):
            raise ConfigurationError(
                f"segments must be Fresh or Chunk, got {type(segment).__name__}. Make them with engine.segment(prompt)."
            )
        core = normalise_chunk(segment.text)
        if isinstance(segment, Fresh) or segment.of is not None or segment.text == core:
            checked.append(segment)
            continue
        start = segment.text.find(core)
        before, after = segment.text[:start], segment.text[start + len(core) :]
        checked += [Fresh(before), Chunk(core), Fresh(after)]
    return [segment for segment in checked if segment.text]


def tokenize_whole(segments: Sequence[Segment], runtime: Runtime) -> TokenizedText:
    """Tokens of joined segments, with offsets in the joined text."""
    return runtime.tokenize_prompt([(segment.text, segment.control) for segment in segments])


def without_parts(segments: Iterable[Segment]) -> list[Segment]:
    """The segments with parts of chunks as fresh text, for methods that need whole chunks."""
    return [Fresh(s.text) if isinstance(s, Chunk) and s.of is not None else s for s in segments]


def as_segments(prompt: Prompt | Sequence[Segment]) -> list[Segment] | None:
    """The prompt if it is a list of segments, else None. Raises ConfigurationError for empty prompts and other
    types."""
    expected = "expected a string, a list of chat messages or a list of segments"
    if not isinstance(prompt, str | list | tuple):
        raise ConfigurationError(f"{expected}, got {type(prompt).__name__}.")
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigurationError(f"the prompt is empty: {expected} that holds text.")
    if isinstance(prompt, str) or isinstance(prompt[0], dict):
        return None
    segments = check_segments(prompt)
    if not segments:
        raise ConfigurationError(f"the prompt is empty: {expected} that holds text.")
    return segments


_PREFIX_DATE = "01 Jan 2025"
"""Date in the shared prefix, for chat templates that state the date. With today's date, all chunks would become misses
every night."""


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model and one system prompt."""

    runtime: Runtime
    system_prompt: str | None = None
    """None: the chat template's default system prompt."""

    def segments(
        self, prompt: Prompt, texts: TextIndex, documents: Iterable[str] = (), *, date: str | None = None
    ) -> list[Segment]:
        """Cut a prompt into chunks and fresh text.

        Args:
            prompt: a string (one user message if the model has a chat template) or a list of messages. The system
                prompt is added to messages without one.
            texts: stored texts to find.
            documents: chunk texts known to be in the prompt, stored or not.
            date: for chat templates that state the date; default today.
        """
        runtime, own = self.runtime, self.system_prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        if not runtime.has_chat_template:
            text = "\n\n".join(message["content"] for message in messages)
            return self._opening() + segment_text(text, texts, documents)
        if all(message["role"] != "system" for message in messages):
            messages = [*self._system_messages(), *messages]
        # the system prompt belongs to the prefix: do not search it for chunks
        return segment_chat(messages, self._render(date), texts, documents, verbatim=(own,) if own else ())

    def prefix_ids(self) -> list[int]:
        """Token ids of the shared prefix: the chat template's text up to the user's first word."""
        content = "\u2063"
        opening = self._opening()
        if self.runtime.has_chat_template:
            messages = [*self._system_messages(), {"role": "user", "content": content}]
            segments = segment_chat(messages, self._render(_PREFIX_DATE), None)  # stored texts do not change it
            opening = segments[: segments.index(Fresh(content))]
        return list(tokenize_whole(opening, self.runtime).ids)

    def _render(self, date: str | None) -> Callable[[Iterable[Message]], str]:
        return lambda messages: self.runtime.render_chat(list(messages), date=date)

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []

    def _opening(self) -> list[Segment]:
        """First segments of a prompt without a chat template: BOS, then the system prompt."""
        opening = [Fresh(self.runtime.opening, control=True), Fresh(self.system_prompt or "", apart=True)]
        return [segment for segment in opening if segment.text]
