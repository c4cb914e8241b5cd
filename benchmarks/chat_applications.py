"""Questions as Open WebUI asks them, with nothing ingested: what does learning from traffic leave to compute?

    python benchmarks/chat_applications.py --primary packaged:qwen2.5-coder-0.5b --documents TEXT... --chats 3
    python benchmarks/chat_applications.py --primary packaged:qwen2.5-coder-0.5b --documents TEXT... --tools tools.json

The application splits the documents itself (1,000 characters, 100 of overlap), rewrites line ends, wraps every chunk
in ``<source …>`` in the newest message, numbered by document as it comes, and sends the history without them. Each chat
asks three questions on the same chunks in another order, each by plain prefill first, then as the server answers.
Between two questions the server is idle. With ``--tools``, a JSON file of definitions as the application sends them,
every request has these tools. Prints per question, as medians over chats, the share of the prompt's tokens that is not
computed, the share whose KV was found, of them by moving KV, and the time to the first token over plain prefill's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from applications import OPEN_WEBUI
from cacheclip_serve import LearnedTexts

from cacheclip_rag import CacheClipEngine, SamplingParams


class Piece(NamedTuple):
    """A chunk, and the document that it is from."""

    name: str
    text: str


QUESTIONS = ("What is this about?", "Who is named in these texts, and why?", "What happened, in one sentence?")
ANSWER = SamplingParams(max_tokens=16)


def split(path: Path, size: int = 1000, overlap: int = 100) -> list[Piece]:
    text = path.read_text().replace("\n", "  \n")
    starts = range(0, max(1, len(text) - overlap), size - overlap)
    return [Piece(path.name, text[start : start + size]) for start in starts]


def prompt(history: list[dict[str, str]], chunks: list[Piece], question: str) -> list[dict[str, Any]]:
    numbers, context = dict[str, int](), list[str]()
    for name, text in chunks:
        number, key = numbers.setdefault(name, len(numbers) + 1), uuid.uuid5(uuid.NAMESPACE_URL, name)
        context.append(f'<source id="{number}" name="{name}" resource-type="file" resource-id="{key}">{text}</source>')
    return [*history, {"role": "user", "content": OPEN_WEBUI.format(context="\n".join(context), question=question)}]


def measured(
    engine: CacheClipEngine, pieces: list[Piece], chat: int, top: int, tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    chooser, history, rows = random.Random(chat), list[dict[str, str]](), list[dict[str, Any]]()
    begin = chooser.randrange(max(1, len(pieces) - top))
    chunks = pieces[begin : begin + top]
    for question in QUESTIONS:
        chooser.shuffle(chunks)
        asked = prompt(history, chunks, question)
        plain = engine.prefill(asked, ANSWER, method="full", tools=tools).stats
        answer = engine.generate(asked, ANSWER, tools=tools)
        assert engine.wait_for_observers(600), "still learning"
        stats = answer.stats
        computed = stats.prompt_tokens - stats.reused_tokens
        rows.append(
            {
                "tokens": stats.prompt_tokens,
                "not_computed": 1 - computed / stats.prompt_tokens,
                "found": 1 - stats.fresh_tokens / stats.prompt_tokens,
                "moved": stats.moved_tokens / stats.prompt_tokens,
                "ttft_s": stats.ttft_s,
                "over_plain": stats.ttft_s / plain.ttft_s,
            }
        )
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.text}]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--primary", required=True)
    parser.add_argument("--auxiliary")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--documents", type=Path, nargs="+", required=True, help="text files")
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--top", type=int, default=6, help="chunks in a prompt")
    parser.add_argument("--tools", type=Path, help="JSON file of tools that every request has")
    args = parser.parse_args()
    pieces = [piece for path in args.documents for piece in split(path)]
    tools = json.loads(args.tools.read_text()) if args.tools else []
    engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, dtype=args.dtype)
    engine.observers.append(LearnedTexts(engine))
    engine.warm_up()
    chats = [measured(engine, pieces, chat, args.top, tools) for chat in range(args.chats)]
    for number, rows in enumerate(zip(*chats, strict=True), 1):
        medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
        print(json.dumps({"question": number, **medians}), flush=True)


if __name__ == "__main__":
    main()
