"""A prompt as segments: text whose KV the store may hold, and text that must be computed now.

Every prompt, from any framework or command, becomes a list of segments. Joined, they are the prompt's text, which is
tokenised as a whole (:mod:`cacheclip_rag.prompt.layout`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any, ClassVar

from ..base.checks import check_parts
from ..base.errors import ConfigurationError
from ..finding.texts import GivenTexts, TextIndex
from ..runtime.base import Message, Runtime
from ..store.sources import check_source
from .contents import escaped, find_contents
from .messages import Documents, Prompt, in_turns, result_as_text, system_in_user
from .reasoning import split_channels
from .tools import (
    Marks,
    calls_as_text,
    check_calls,
    check_name,
    one_call_each,
    unmarked,
    with_short_ids,
    with_thinking,
)


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
        return self.text if self.of is None else self.of


Segment = Fresh | Chunk


def normalise_chunk(text: str) -> str:
    """A chunk's text without surrounding white space, because frameworks strip chunks before they paste them."""
    if not isinstance(text, str):
        raise ConfigurationError(f"a text must be a string, got {type(text).__name__}.")
    return text.strip()


def chunk_texts(texts: Iterable[str]) -> Iterator[str]:
    """Each text, normalised. Raises ConfigurationError: ``texts`` is a single string, or holds something other than
    strings; one has the source of learned texts."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        kind = "one string: put it in a list" if isinstance(texts, str) else type(texts).__name__
        raise ConfigurationError(f"expected a list of texts, got {kind}.")
    if isinstance(texts, Mapping):
        kept = (origins for origins in texts.values() if isinstance(origins, Collection))  # others are read once
        check_source(*chain.from_iterable(chain.from_iterable(kept)))
    return map(normalise_chunk, texts)


def given_texts(documents: Documents) -> list[str]:
    """The texts of documents that a caller gives with a prompt, normalised, each once, without empty ones."""
    return [text for text in dict.fromkeys(chunk_texts(documents)) if text]


def segment_text(text: str, index: TextIndex | None, documents: Iterable[str] | GivenTexts = ()) -> list[Segment]:
    """Cut ``text`` into chunks (stored texts, normalised ``documents``, and their parts) and fresh text. Joined,
    they equal ``text``."""
    segments: list[Segment] = []
    position = 0
    for match in index.find(text, documents) if index is not None else ():
        if match.start > position:
            segments.append(Fresh(text[position : match.start]))
        segments.append(Chunk(text[match.start : match.stop], match.of, match.at))
        position = match.stop
    if position < len(text):
        segments.append(Fresh(text[position:]))
    return segments


def segment_chat(
    messages: Sequence[Message],
    render: Callable[..., str],
    index: TextIndex | None,
    documents: Iterable[str] | GivenTexts = (),
    verbatim: Collection[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Segment]:
    """Segments of a chat: the template's text as control segments, each content cut by :func:`segment_text`.

    The template is rendered with a sentinel in place of each content, and split there, so that no content can imitate
    the template. White space around a content does pass through the template, because some templates strip it. Some
    templates look at contents, and leave the reasoning of earlier answers out: what they make of the real contents is
    the prompt, if contents and template can be told apart in it (:mod:`~cacheclip_rag.prompt.contents`). Contents in
    ``verbatim`` are not searched for chunks.

    Templates write arguments of calls and definitions of tools as JSON. Strings in them are marked, pass through the
    template, and become fresh text that is no control text. Calls that the template does not write become text of
    their message.

    Args:
        render: writes messages with the chat template; with ``tools=``, if there are tools.
        documents: normalised, see :func:`given_texts`.

    Raises:
        ConfigurationError: the template drops a message, or does not use tools.
    """
    messages = check_messages(messages)
    documents = documents if isinstance(documents, GivenTexts) else list(documents)
    marks = Marks()
    if any("tool_calls" in message for message in messages):
        messages = _calls_for(render, messages, marks)
    own = [text.strip() for text in verbatim]
    segments: list[Segment] = []
    for text, is_content in _contents_and_template(messages, render, tools, marks):
        if not is_content:
            segments += [Fresh(piece, control=control) for piece, control in marks.split(text)]
        elif text.strip() in own:
            segments.append(Fresh(text))
        else:
            segments += segment_text(text, index, documents)
    return [segment for segment in segments if segment.text]


def _contents_and_template(
    messages: Sequence[Message], render: Callable[..., str], tools: Sequence[Mapping[str, Any]], marks: Marks
) -> list[tuple[str, bool]]:
    """The prompt in pieces, each with whether it is a message's content (or else the template's)."""
    cores = [message["content"].strip() for message in messages]
    around = [m["content"].split(c, 1) if c else (m["content"], "") for m, c in zip(messages, cores, strict=True)]
    # the quote shows whether the template writes results of tools as JSON (Llama 3, Hermes)
    quotes = ['"' if message["role"] == "tool" else "" for message in messages]
    sentinels = [f"\u2063{marks.nonce}{n}{quote}\u2063" for n, quote in enumerate(quotes)]
    marked = [f"{lead}{sentinel}{trail}" for sentinel, (lead, trail) in zip(sentinels, around, strict=True)]
    # a template may ask whether a message with calls has a content, and may drop the content
    calling = {number for number, message in enumerate(messages) if "tool_calls" in message}
    marked = ["" if n in calling and not cores[n] else text for n, text in enumerate(marked)]
    real = [marks.fields(message) for message in messages]
    shown = [{**message, "content": text} for message, text in zip(real, marked, strict=True)]
    rendered = render(shown)
    if tools:
        render = partial(render, tools=[marks.definition(tool) for tool in tools])
        without, rendered = rendered, render(shown)
        if rendered == without:
            raise ConfigurationError(
                "this model's chat template does not use tools, so the model cannot be told of them. Use a model that "
                "was trained to call tools (such as Qwen 2.5, Llama 3 or Mistral), or describe the tools in a message."
            )
    # no pattern holds the nonce: it would be compiled for every prompt
    first, *rest = rendered.split(f"\u2063{marks.nonce}")
    split = [first, *(part for each in rest for part in _SENTINEL.split(each)[1:])]
    pieces, numbers, escapes = split[::3], list(map(int, split[1::3])), split[2::3]
    # Mistral's templates leave the system message out after results of tools
    left_out = {n for n, message in enumerate(messages) if calling and message["role"] == "system"}
    for number in set(range(len(messages))) - calling - left_out - set(numbers):
        raise ConfigurationError(
            f"this model's chat template drops a message of role {messages[number]['role']!r}. Use roles it knows "
            "(usually system, user, assistant, in alternation), or pass the prompt as one string."
        )
    # a backslash for JSON, three for JSON in JSON
    times = [max(0, len(escape).bit_length() - 1) for escape in escapes]
    written: list[tuple[str, bool]] = []
    for position, number in enumerate(numbers):
        text, (lead, trail) = cores[number], around[number]
        text = escaped(text, times[position]) if times[position] else text
        if lead and pieces[position].endswith(lead):
            pieces[position], text = pieces[position].removesuffix(lead), lead + text
        if trail and pieces[position + 1].startswith(trail):
            pieces[position + 1], text = pieces[position + 1].removeprefix(trail), text + trail
        written += [(pieces[position], False), (text, True)]
    written.append((pieces[-1], False))
    rendered = render(real)
    if "".join(text for text, _ in written) != rendered:
        written = find_contents(render, real, rendered, dict(zip(numbers, times, strict=True))) or written
    return written


_SENTINEL = re.compile(r'\A([0-9]+)((?:\\*")?)\u2063')
"""What stands behind the nonce: the message's number, and how its quote was escaped."""


def _calls_for(render: Callable[..., str], messages: list[Message], marks: Marks) -> list[Message]:
    """Messages as a template takes their calls: with short ids where it refuses others, with content and reasoning as
    one where it refuses both, with one call a message where it refuses or forgets more, as text where it writes none.
    """
    ways: list[list[Message]] = []
    for alone in (messages, one_call_each(messages)):
        for joined in (False, True):
            way = [with_thinking(message, joined=joined) for message in alone]
            ways += [each for each in (way, with_short_ids(way)) if each not in ways]
    refusal, best = None, (0, messages)
    for way in ways:
        shown, names = marks.renamed(way)
        try:
            written = render(shown)
        except ConfigurationError as error:
            refusal = error
            continue
        count = sum(name in written for name in names)
        if not count:
            return [calls_as_text(message) for message in messages]
        if count == len(names):
            return way
        best = max(best, (count, way), key=lambda each: each[0])
    if not best[0]:
        assert refusal is not None, "a way was tried"
        raise refusal
    return best[1]


_ROLE = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a role may be: the chat template writes it as control text, so it must not hold names of control tokens."""


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages as a list, with role, content and calls of tools: the chat template can write other fields as
    control text. Raises ConfigurationError: a message has no role of one word, no text, or another field."""
    if not messages:
        raise ConfigurationError("a chat prompt needs at least one message, got none.")
    checked: list[Message] = []
    names: dict[str, str] = {}
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigurationError(f"each message must be a dict, got {type(message).__name__}.")
        content = message.get("content")
        if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
            content = ""
        check_parts(content)
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise ConfigurationError(
                "each message must be a dict with string 'role' and 'content', got "
                f"{ {k: type(v).__name__ for k, v in message.items()} }."
            )
        if not _ROLE.fullmatch(message["role"]):
            raise ConfigurationError(
                f"a role must be a word of letters, digits, '_' and '-' such as 'user', got {message['role'][:80]!r}. "
                "Names of control tokens are not accepted in roles."
            )
        known = ("role", "content", *_FIELDS.get(message["role"], ()))
        others = sorted(str(key) for key, value in message.items() if key not in known and value)
        if others:
            raise ConfigurationError(
                f"a message of role {message['role']!r} has {', '.join(map(repr, known))} only, got also "
                f"{', '.join(map(repr, others))}. Write what the model should read into the content."
            )
        fields = {name: message[name] for name in known[2:] if message.get(name)}
        for name in fields.keys() & {"tool_call_id", "name"}:
            check_name(f"{name} of a message", fields[name])
        if not isinstance(fields.get("reasoning_content", ""), str):
            raise ConfigurationError(f"reasoning_content must be a string, got {type(fields['reasoning_content'])}.")
        if "tool_calls" in fields:
            fields["tool_calls"] = check_calls(fields["tool_calls"])
            names |= {call["id"]: call["function"]["name"] for call in fields["tool_calls"] if "id" in call}
        if "name" not in fields and fields.get("tool_call_id") in names:
            fields["name"] = names[fields["tool_call_id"]]
        if message["role"] == "assistant" and not fields.get("reasoning_content"):
            reasoning, content = split_channels(content)
            fields |= {"reasoning_content": reasoning} if reasoning else {}
        checked.append({"role": message["role"], "content": content, **fields})
    return checked


_FIELDS = {"assistant": ("tool_calls", "reasoning_content"), "tool": ("tool_call_id", "name")}
"""Fields that a message may have beside role and content, by role."""


def check_segments(segments: Iterable[Segment]) -> list[Segment]:
    """Check segment types, drop empty segments, and turn white space around a chunk's text into fresh text. Raises
    ConfigurationError: a segment is neither Fresh nor Chunk."""
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


def _strings(value: Any) -> Iterator[str]:
    """All strings and keys in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _strings(each)


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
        self,
        prompt: Prompt,
        texts: TextIndex | None,
        documents: Iterable[str] | GivenTexts = (),
        *,
        date: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        as_it_stands: bool = False,
    ) -> list[Segment]:
        """Cut a prompt into chunks and fresh text.

        Args:
            prompt: a string (one user message if the model has a chat template) or a list of messages. The system
                prompt is added to messages without one.
            texts: stored texts to find; None finds none.
            documents: chunk texts known to be in the prompt, stored or not; normalised, see :func:`given_texts`.
            date: for chat templates that state the date; default today.
            tools: definitions of tools that the model may call, which
                :func:`~cacheclip_rag.prompt.tools.check_tools` gave.
            variables: further variables of the chat template, which
                :func:`~cacheclip_rag.prompt.messages.check_template_kwargs` gave.
            as_it_stands: the prompt is a text without a chat template, also if the model has one.

        Raises:
            ConfigurationError: the prompt or a definition is malformed, or the chat template does not use tools.
        """
        if tools and not as_it_stands:
            self._check_tools(tools)
        runtime, own = self.runtime, self.system_prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt)
        if as_it_stands or not runtime.has_chat_template:
            text = "\n\n".join(calls_as_text(message)["content"] for message in messages)
            return self._opening() + segment_text(text, texts, documents)
        if own and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": own}, *messages]
        # the system prompt belongs to the prefix: do not search it for chunks
        verbatim = (own,) if own else ()
        render: Callable[..., str] = partial(runtime.render_chat, date=date)
        if variables:
            self._check_no_control(_strings(variables), "chat_template_kwargs have")
            render = partial(render, variables=variables)
        cut = partial(segment_chat, index=texts, documents=documents, verbatim=verbatim, tools=tools)
        try:
            return cut(messages, render)
        except ConfigurationError:  # in turns; then the system prompt opens the user's message, as in Gemma 3
            ways = messages, in_turns(messages), in_turns(map(result_as_text, messages))
            renders = [render]
            if any(message["role"] == "system" for message in messages):
                renders.append(lambda shown, **named: render(system_in_user(shown), **named))
            for each, way in [*product(renders, ways)][1:]:
                with suppress(ConfigurationError):
                    return cut(way, each)
            raise

    def prefix_ids(self) -> list[int]:
        """Token ids of the shared prefix: the chat template's text up to the user's first word."""
        content = "\u2063"
        opening = self._opening()
        if self.runtime.has_chat_template:
            segments = self.segments(content, None, date=_PREFIX_DATE)  # stored texts do not change it
            opening = segments[: segments.index(Fresh(content))]
        return list(self.runtime.tokenize_prompt(opening).ids)

    def _check_tools(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigurationError if the model cannot be told of tools, or the template would write one of their names
        and keys as control text."""
        if not self.runtime.has_chat_template:
            raise ConfigurationError(
                "this model has no chat template, so it cannot be told of tools. Use a model that was trained to call "
                "tools, or describe the tools in the prompt."
            )
        self._check_no_control(unmarked(tools), "a definition of a tool has the name or key")

    def _check_no_control(self, texts: Iterable[str], what: str) -> None:
        """Raise ConfigurationError if a text holds the name of a control token."""
        for text in texts:
            if self.runtime.tokenize(text, control=True).ids != self.runtime.tokenize(text).ids:
                raise ConfigurationError(
                    f"{what} {text[:80]!r}, which holds the name of a control token of this model. Rename it."
                )

    def _opening(self) -> list[Segment]:
        """First segments of a prompt without a chat template: BOS, then the system prompt."""
        opening = [Fresh(self.runtime.opening, control=True), Fresh(self.system_prompt or "", apart=True)]
        return [segment for segment in opening if segment.text]
