"""Questions as Open WebUI asks them, with nothing ingested: what does learning from traffic leave to compute?

    python benchmarks/chat_applications.py --primary packaged:qwen2.5-coder-0.5b --documents TEXT... --chats 3

The application splits the documents itself (1,000 characters, 100 of overlap), rewrites line ends, wraps every chunk
in ``<source …>`` in the newest message, and sends the history without them. Each chat asks three questions on the same
chunks in another order, each by plain prefill first (with prefix caching), then as the server answers. Between two
questions the server is idle. Prints per question, as medians over chats, the share of the prompt's tokens that is not
computed, the share whose KV was found, of them by moving KV, and the time to the first token over plain prefill's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from applications import OPEN_WEBUI
from cacheclip_serve import LearnedTexts

from cacheclip_rag import CacheClipEngine, SamplingParams

QUESTIONS = ("What is this about?", "Who is named in these texts, and why?", "What happened, in one sentence?")
ANSWER = SamplingParams(max_tokens=16)


def split(text: str, size: int = 1000, overlap: int = 100) -> list[str]:
    text = text.replace("\n", "  \n")
    return [text[start : start + size] for start in range(0, max(1, len(text) - overlap), size - overlap)]


def prompt(history: list[dict[str, str]], chunks: list[str], question: str) -> list[dict[str, Any]]:
    numbered = enumerate(chunks, 1)
    context = "\n".join(f'<source id="{n}" name="file-{n}.txt">{chunk}</source>' for n, chunk in numbered)
    return [*history, {"role": "user", "content": OPEN_WEBUI.format(context=context, question=question)}]


def measured(engine: CacheClipEngine, documents: str, chat: int, top: int) -> list[dict[str, Any]]:
    chooser, history, rows = random.Random(chat), list[dict[str, str]](), list[dict[str, Any]]()
    pieces = split(documents)
    begin = chooser.randrange(max(1, len(pieces) - top))
    chunks = pieces[begin : begin + top]
    for question in QUESTIONS:
        chooser.shuffle(chunks)
        asked = prompt(history, chunks, question)
        plain = engine.prefill(asked, ANSWER, method="full").stats
        answer = engine.generate(asked, ANSWER)
        assert engine.wait_for_observers(600), "still learning"
        stats = answer.stats
        computed = stats.fresh_tokens + stats.recomputed_tokens
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
    args = parser.parse_args()
    documents = "\n".join(path.read_text() for path in args.documents)
    engine = CacheClipEngine(primary=args.primary, auxiliary=args.auxiliary, dtype=args.dtype)
    engine.observers.append(LearnedTexts(engine))
    engine.warm_up()
    chats = [measured(engine, documents, chat, args.top) for chat in range(args.chats)]
    for number, rows in enumerate(zip(*chats, strict=True), 1):
        medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
        print(json.dumps({"question": number, **medians}), flush=True)


if __name__ == "__main__":
    main()
