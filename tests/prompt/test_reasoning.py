"""Reasoning before an answer: it is no text, no call and no stop string, in pieces of any length."""

from collections.abc import Sequence
from typing import Any

import pytest
from cacheclip_testing import FakeRuntime, fake_models, fake_of
from hypothesis import given, strategies as st

from cacheclip_rag import Answer, CacheClipEngine, Event
from cacheclip_rag.adapters.finishing import final_events
from cacheclip_rag.answering.text import TextStream
from cacheclip_rag.prompt.calls import CallReader
from cacheclip_rag.prompt.reasoning import ReasoningReader
from cacheclip_rag.runtime.markers import REASONING_MARKERS, known_reasoning, markers_among
from tests.conftest import examples

CALL = '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
SIGNS = ("`", "```", "~~~", "\n", " ", "    ", "a", "* ", "<pre>", "</pre>")
TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>")
PAIRS = pytest.mark.parametrize(("opening", "closing"), REASONING_MARKERS)
SIZES = (1, 2, 5, 1000)


def read(text: str, prompt_end: str = "", sizes: Sequence[int] = SIZES) -> tuple[str, str]:
    """Reasoning and text, the same in pieces of each size."""

    def of_pieces(size: int) -> tuple[str, str]:
        reader = ReasoningReader(prompt_end)
        found = [*(reader.push(text[n : n + size]) for n in range(0, len(text), size)), reader.close()]
        return "".join(reasoning for reasoning, _ in found), "".join(said for _, said in found)

    [found] = {of_pieces(size) for size in sizes}
    return found


def streamed(text: str, stop: list[str], prompt_end: str | None, ends: Sequence[str] = ()) -> tuple[str, str, bool]:
    """Reasoning, text and whether a stop string ended it, one character a token."""
    stream, said, reasoning = TextStream(lambda ids: "".join(map(chr, ids)), stop, prompt_end, ends), "", ""
    for token in [*map(ord, text), None]:
        piece = stream.flush() if token is None else stream.push(token)
        said, stream.revised_from = said[: stream.revised_from] + piece, None
        assert stream.text.startswith(said)
        if stream.stopped_by is not None or token is None:
            said += "" if token is None else stream.flush()
            break
        reasoning, stream.reasoning = reasoning + stream.reasoning, ""
    assert stream.text == said
    return reasoning + stream.reasoning, said, stream.stopped_by is not None


class TestReader:
    @pytest.mark.parametrize(
        ("text", "reasoning", "said"),
        [
            ("O\nSo.\nYes.\nC\n\nTwelve.\n", "So.\nYes.", "Twelve.\n"),
            (" \nO So. C Twelve.", "So.", "Twelve."),
            ("O\n\nC\n\nTwelve.", "", "Twelve."),
            ("O So.", "So.", ""),
            ("O a C O b C c", "a\n\nb", "c"),
            ("O a < b </ C c", "a < b </", "c"),
            ("O the marker `C` ends it. C c", "the marker `C` ends it.", "c"),
            ("O it ends with `C c", "it ends with `", "c"),
            ("Twelve. O a C", "", "Twelve. O a C"),
            (" Twelve.", "", " Twelve."),
            ("C Twelve.", "", "C Twelve."),
            ("<b>Twelve.</b>", "", "<b>Twelve.</b>"),
            ("", "", ""),
            ("\n", "", "\n"),
        ],
    )
    def test_at_the_beginning(self, text: str, reasoning: str, said: str) -> None:
        for opening, closing in REASONING_MARKERS:
            marked = [each.replace("O", opening).replace("C", closing) for each in (text, reasoning, said)]
            assert read(marked[0]) == (marked[1], marked[2])

    @pytest.mark.parametrize(
        "answer",
        [
            "<think>\nO\n</think>\n\n",  # Qwen 3
            "[THINK]O[/THINK]",  # Magistral
            "<seed:think>O</seed:think>",
            "<thought>\nO\n</thought>\n\n",  # EXAONE Deep
            "<thinking>\nO\n</thinking>\n",
            "<reasoning>\nO\n</reasoning>\n",
            "◁think▷O◁/think▷",  # Kimi VL
            "<|channel>thought\nO\n<channel|>",  # Gemma 4
            "<|channel|>analysis<|message|>O<|end|><|start|>assistant<|channel|>final<|message|>",  # GPT-OSS
        ],
    )
    def test_of_published_models(self, answer: str) -> None:
        said = answer.replace("O", f"So. {CALL}") + "Twelve."
        assert read(said) == (f"So. {CALL}", "Twelve.")
        assert calls_in(said) == (said, [])

    @pytest.mark.some(3)
    @PAIRS
    @pytest.mark.parametrize(
        ("text", "reasoning", "said"),
        [
            ("So.\nC\n\nTwelve.", "So.", "Twelve."),
            ("\n\nC\n\nTwelve.", "", "Twelve."),
            ("O\nSo.C Twelve.", "So.", "Twelve."),
            ("So", "So", ""),
        ],
    )
    def test_a_template_that_opens_it(self, opening: str, closing: str, text: str, reasoning: str, said: str) -> None:
        text = text.replace("O", opening).replace("C", closing)
        for end in (opening, f"x\n{opening}\n"):
            assert read(text, end) == (reasoning, said)
            assert streamed(text, ["never"], end) == (reasoning, said, False)
        assert read("Twelve.", f"{opening}\n\n{closing}\n\n") == ("", "Twelve."), "one that closes it"

    @examples(200)
    @given(st.lists(st.sampled_from([*"<>[]/ \na", "think", "<think>", "</think>", "[/THINK]"])), st.integers(1, 9))
    def test_pieces_change_nothing(self, parts: list[str], size: int) -> None:
        text = "".join(parts)
        assert streamed(text, [], "")[:2] == read(text, sizes=(size, len(text) or 1))


class TestUnopened:
    """Some models end reasoning that nothing opened."""

    PAIRS = pytest.mark.parametrize(("opening", "closing"), [p for p in REASONING_MARKERS if p[1] != "<|end|>"])

    @pytest.mark.some(5)
    @PAIRS
    @pytest.mark.parametrize(
        ("text", "reasoning", "said"),
        [
            ("So.\nYes.\nC\n\nTwelve.\n", "So.\nYes.", "Twelve.\n"),
            ("\n\nSo.C Twelve.", "So.", "Twelve."),
            ("C\n\nTwelve.", "", "Twelve."),
            ("So. C", "So.", ""),
            ("So. C\n", "So.", ""),
            ("So. CO Yes. CTwelve. C", "So.\n\nYes.", "Twelve. C"),
            ("The marker `C` ends it.\nC Twelve.", "The marker `C` ends it.", "Twelve."),
            ('He said "yes."C\nTwelve.', 'He said "yes."', "Twelve."),
            ("O So. C Twelve. C", "So.", "Twelve. C"),
            ("a O b C c", "", "a O b C c"),
            ("Write `C` then.", "", "Write `C` then."),
            ("Write `a C b` then.", "", "Write `a C b` then."),
            ('Write "C" then.', "", 'Write "C" then.'),
            ("Write „C“ or 'C' then.", "", "Write „C“ or 'C' then."),
            ("So:\n```\nC\n```\nis it.", "", "So:\n```\nC\n```\nis it."),
        ],
    )
    def test_its_end_is_found(self, opening: str, closing: str, text: str, reasoning: str, said: str) -> None:
        for end in ("<|im_start|>assistant\n", "O\n\nC\n\n"):
            put = {each: each.replace("O", opening).replace("C", closing) for each in (text, reasoning, said, end)}
            assert streamed(put[text], ["never"], put[end], [closing]) == (put[reasoning], put[said], False)

    @PAIRS
    def test_only_where_the_template_knows_it(self, opening: str, closing: str) -> None:
        assert streamed(f"So.{closing}Twelve.", [], "") == ("", f"So.{closing}Twelve.", False)
        template = f"{{{{ content.split('{closing}')[-1] }}}}"
        assert known_reasoning(template, {})[1] == known_reasoning(None, {3: closing})[1] == (closing,)
        assert known_reasoning({"default": "", "tool_use": template}, {})[1] == (closing,)
        assert known_reasoning("<|end|>", {})[1] == known_reasoning(None, {})[1] == ()

    @pytest.mark.parametrize("tools", [[], ["f"]])
    def test_of_an_engine(self, tools: list[str]) -> None:
        """Nothing in it is a call; who can take text back does, and who cannot has the answer without it."""
        says = f"I could send {CALL}.</think>\n\nTwelve.{CALL if tools else ''}"
        options = {"tools": [{**TestAnswers.TOOL, "name": name} for name in tools]}
        _, events = answered(says, ends=("</think>",), **options)
        shown = ""
        for event in events:
            shown = shown[: event.revised_from] + event.text
        whole = whole_of(events)
        assert (whole.reasoning, whole.text, shown) == (f"I could send {CALL}.", "Twelve.", "Twelve.")
        assert [call.name for call in whole.tool_calls] == tools
        assert [call for event in events for call in event.tool_calls] == list(whole.tool_calls)
        final = list(final_events(answered(says, ends=("</think>",), **options)[1]))
        assert "".join(event.text for event in final).endswith("\n\nTwelve.")
        assert whole_of(final).text == "Twelve." and all(event.revised_from is None for event in final)

    def test_of_an_answer_that_is_revised(self) -> None:
        decode, ends = (lambda ids: "".join(map(chr, ids))), ["</think>"]

        def stream(text: str) -> TextStream:
            found = TextStream(decode, [], "", ends)
            for each in text:
                found.push(ord(each))
            return found

        for first, then, expected in [
            ("So.</think>Ten", "So.</think>Twelve.", "Twelve."),
            ("So.</think>Ten", "So. Twelve.", "So. Twelve."),
            ("So. Ten", "So.</think>Twelve.", "Twelve."),
            ("So. Ten", "So. Twelve.", "So. Twelve."),
        ]:
            old, new = stream(first), TextStream(decode, [], "", ends)
            common = next(n for n, (a, b) in enumerate(zip(first, then, strict=False)) if a != b)
            shown, piece = old.text, ""
            new.replay([*map(ord, then[:common])], old)
            for each in [*map(ord, then[common:]), None]:
                piece = new.flush() if each is None else new.push(each)
                shown, new.revised_from = shown[: new.revised_from] + piece, None
            assert shown == new.text == expected


CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "x"}'
NEXT = "<|end|><|start|>assistant"


class TestChannels:
    """GPT-OSS answers in messages, each in a channel."""

    @pytest.mark.parametrize(
        ("answer", "reasoning", "said"),
        [
            (f"<|channel|>analysis<|message|>So.{NEXT}<|channel|>final<|message|>Twelve.", "So.", "Twelve."),
            ("<|channel|>final<|message|>Twelve.", "", "Twelve."),
            (
                f"<|channel|>analysis<|message|>a{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
                f"<|channel|>analysis<|message|>b{NEXT}<|channel|>final<|message|>c",
                "a\n\nI look.\n\nb",
                "c",
            ),
            ("<|channel|>analysis<|message|>cut", "cut", ""),
            (f"<|channel|>analysis<|message|>cut{NEXT}", "cut", "<|start|>assistant"),
            ("<|start|>assistant<|channel|>final<|message|>Twelve.", "", "Twelve."),
        ],
    )
    def test_messages(self, answer: str, reasoning: str, said: str) -> None:
        assert read(answer) == (reasoning, said)
        assert streamed(answer, ["never"], "<|start|>assistant") == (reasoning, said, False)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (CALLED, ""),
            (f"<|start|>assistant{CALLED}", ""),
            (f"{NEXT}{CALLED}", ""),
            (' to=functions.f<|channel|>commentary json<|message|>{"a": "x"}', ""),
            ('<|start|>assistant to=functions.f<|channel|>commentary <|constrain|> json<|message|>{"a": "x"}', ""),
            (f"I look.{NEXT}{CALLED}", "I look."),
        ],
    )
    def test_calls(self, answer: str, said: str) -> None:
        assert calls_in(answer) == (said, ["f"])

    @pytest.mark.parametrize(
        "text",
        [
            f"It writes `{CALLED}` then.",
            f"<|channel|>analysis<|message|>I could {CALLED}",
            "Send it to=functions.f or not.",
            "<|channel|>commentary to=functions.f is a header",
            CALLED.removesuffix("}"),
        ],
    )
    def test_no_calls(self, text: str) -> None:
        assert calls_in(text) == (text, [])

    def test_tokens(self) -> None:
        """Their names are of channels only where there are channels."""
        tokens = dict(enumerate(["<|end|>", "<|channel|>", "<|message|>", "<|im_end|>", "<think>"]))
        assert [*markers_among(tokens)] == [0, 1, 2, 4]
        assert [*markers_among({0: "<|end|>", 3: "<|im_end|>", 4: "<think>"})] == [4]
        assert [*markers_among(dict(enumerate(["<|channel>", "<channel|>", "<|turn>", "<thought>"])))] == [0, 1, 3]
        for token in ("<|channel>", "<|channel|>", "[THINK]"):
            assert known_reasoning(None, {1: token})[0]
        assert not known_reasoning(None, {0: "<|end|>"})[0]


@PAIRS
def test_in_reasoning_stop_strings_end_nothing(opening: str, closing: str) -> None:
    text = f"{opening}\nFirst. STOP. Second.\n{closing}\n\nTwelve metres. STOP. More."
    assert streamed(text, ["STOP"], "<|im_start|>assistant\n") == ("First. STOP. Second.", "Twelve metres. ", True)
    assert streamed("<think>a STOP", ["STOP"], None) == ("", "<think>a ", True), "a text that is read as it stands"
    lines = streamed("<think>a\n\nb</think>\n\nTwelve.\n\nMore", ["\n\n"], "")
    assert lines == ("a\n\nb", "Twelve.", True), "line ends after reasoning are none"


class TestCalls:
    @pytest.mark.some(3)
    @PAIRS
    @pytest.mark.parametrize("before", ["", "Let me see.\n"])
    def test_in_reasoning_there_are_none(self, opening: str, closing: str, before: str) -> None:
        text = f"{before}{opening}\nI could send {CALL}, but no.\n{closing}\n\nIt would delete the file."
        assert calls_in(text) == (text, [])
        assert calls_in(f"{text}\n{CALL}") == (f"{text}\n", ["f"])

    @pytest.mark.some(5)
    @pytest.mark.parametrize(
        "shown",
        [
            f"Calls look so:\n\n```\n{CALL}\n```\nUse them.",
            f"1. So:\n   ~~~\n   {CALL}\n   ~~~\n",
            f"Write `{CALL}` for a call.",
            f'Write "{CALL}" for a call.',
            f"As he said:\n\n> {CALL}\n",
            f"Write '{CALL}' for a call.",
            f"Write “{CALL}”, „{CALL}“ or «{CODER}».",
            f'Write "so: {CALL} and so on" for a call.',
            f"```xml\n{CALL}\n```\nThis is what a call looks like.",
            "So:\n```\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n```",
            'So:\n```\n[TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}]\n```',
            'So:\n```json\n{"name": "f", "arguments": {"a": "x"}}\n```',
            f"1. The format is:\n\n    ```xml\n    {CALL}\n    ```\n",
            f"* ```xml\n  {CALL}\n  ```\n",
            f"12) ~~~~\n{CALL}\n~~~~\n",
            f"> ```\n> {CALL}\n> ```\n",
            f"The format is: ```xml\n{CALL}\n```\n",
            f"````md\nSo:\n```xml\n{CALL}\n```\nor\n{CALL}\n````\n",
            f"So: ~~~~\n~~~\n{CALL}\n~~~\n{CALL}\n~~~~\n",
            f"Sure. <think>maybe {CALL}</think> no",
            f"Sure. <think>a</think> Or [THINK]maybe {CALL}[/THINK] no",
            f"`the call is {CALL}`",
            f"So `x`, ``a ` is {CALL}`` it.",
            f"Format: ```{CALL}```",
            f"`the call is {CODER}` it is",
            f"The tag <think> opens it:\n```\n{CALL}\n```\n",
            f"The format is <pre>{CALL}</pre> here.",
            f"<pre>\n{CALL}\n</pre>\nis the format.",
            f"Here is my thought process: I could {CALL}\n\nHere is my response: no",
            f'So: <PRE><code class="xml">{CODER}</code></PRE> and <code>{CALL}</code> too.',
            f"Use <code>x</code> or\n<code>\n{CALL}\n</code>\n",
            f"Calls look so:\n\n    {CALL}\n\nUse them.\n",
            f"Calls look so:\n\n\t{CALL}\n\n    {CALL}\nUse them.\n",
            "Calls look so:\n\n    " + CODER.replace("\n", "\n    ") + "\n\nUse them.\n",
            f"1. a\n\nCalls look so:\n \n     x\n    {CALL}\nUse them.\n",
        ],
    )
    def test_that_are_only_shown_are_none(self, shown: str) -> None:
        assert calls_in(shown) == (shown, [])
        assert calls_in(f"{shown}\n{CALL}") == (f"{shown}\n", ["f"]), "a call after it counts"

    def test_a_fence_around_the_whole_answer_is_a_call(self) -> None:
        assert calls_in(f"```\n{CALL}\n```") == ("", ["f"])

    @pytest.mark.parametrize(
        "said",
        [
            f"```python\nprint(1)\n```\n{CALL}",
            f"Say ```x``` once.\n{CALL}",
            f"```x``` is code.\n{CALL}",
            f"The tag <think> opens it.\n{CALL}",
            f"<think>a</think>{CALL}",
            f"Sure. <think>a</think> Now: {CALL}",
            f"The tags <think> and `</think>`.\n{CALL}",
            f"It`s the mast. {CALL}",
            f'It\'s "the mast". {CALL}',
            f'It is 5" wide. {CALL}',
            f'"So it is."\n{CALL}',
            f"> So it is.\n{CALL}",
            f'He asked: "\n{CALL}',
            f"Three ``` open code.\n{CALL}",
            f"Use `x`{CALL}",
            f"The tag <code> opens it.\n{CALL}",
            f"Here is my thought process: I look.\n{CALL}",
            f"<pre>x</pre>\n{CALL}",
            f"I look:\n    {CALL}",
            f"I look:\n\n   {CALL}",
            f"\n\n    {CALL}",
            f"1. I look:\n\n    {CALL}",
            f"- I look:\n- a\n\n\t{CALL}",
            f"So:\n\n    x\n{CALL}",
        ],
    )
    def test_after_what_is_shown(self, said: str) -> None:
        assert calls_in(said) == (said.removesuffix(CALL), ["f"])

    @examples(300)
    @given(st.lists(st.sampled_from([*SIGNS, CALL, CODER, *TAGS])))
    def test_pieces_change_nothing(self, parts: list[str]) -> None:
        text = "".join(parts)
        calls_in(text, (1, 7, len(text) or 1))


def calls_in(text: str, sizes: Sequence[int] = SIZES) -> tuple[str, list[str]]:
    """Text and calls, the same in pieces of each size."""

    def of_pieces(size: int) -> tuple[str, tuple[str, ...]]:
        reader = CallReader({"f": {}})
        found = [*(reader.push(text[n : n + size]) for n in range(0, len(text), size)), reader.close()]
        return "".join(said for said, _ in found), tuple(call.name for _, calls in found for call in calls)

    [(said, calls)] = {of_pieces(size) for size in sizes}
    return said, [*calls]


class TestAnswers:
    SAID = f"<think>I could send {CALL}. STOP.</think>It is twelve metres tall. STOP. More."
    TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}

    @pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}], ids=["plain", "tools"])
    def test_of_an_engine(self, options: dict[str, Any]) -> None:
        runtime, events = answered(self.SAID, stop="STOP", **options)
        whole = whole_of(events)
        assert whole.reasoning == f"I could send {CALL}. STOP."
        assert (whole.text, whole.tool_calls, whole.finish_reason) == ("It is twelve metres tall. ", (), "stop")
        assert "".join(event.reasoning for event in events) == whole.reasoning
        assert "".join(event.text for event in events) == whole.text
        assert len([event for event in events if event.reasoning]) > 5, "it is streamed"
        assert isinstance(runtime, FakeRuntime)

    def test_that_is_cut_off_while_the_model_reasons(self) -> None:
        _, events = answered("<think>One two three four five six", max_tokens=6)
        whole = whole_of(events)
        assert (whole.text, whole.reasoning, whole.finish_reason) == ("", "One two three", "length")

    def test_to_a_text_that_is_read_as_it_stands(self) -> None:
        _, events = answered(self.SAID, as_it_stands=True, max_tokens=400)
        assert whole_of(events).text == self.SAID and not whole_of(events).reasoning


def answered(
    said: str, *, as_it_stands: bool = False, ends: Sequence[str] = (), **options: Any
) -> tuple[FakeRuntime, list[Event]]:
    engine = CacheClipEngine(**fake_models(), method="full")
    runtime = fake_of(engine)
    runtime.reasoning_ends = ends
    runtime.says = [said]
    prompt: Any = engine.parts.segment("How tall?", as_it_stands=True) if as_it_stands else "How tall?"
    return runtime, list(engine.stream(prompt, **options))


def whole_of(events: list[Event]) -> Answer:
    answer = events[-1].answer
    assert answer is not None
    return answer
