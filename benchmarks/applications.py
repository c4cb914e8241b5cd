"""Plays the requests of Open WebUI and of LiteLLM against a running server, of either backend.

    cacheclip ingest docs/ --store my-store
    cacheclip serve --store my-store --api-key KEY
    python benchmarks/applications.py --address http://127.0.0.1:8000 --key KEY --document docs/a.txt

Open WebUI lists the models, then streams an answer to its prompt for documents, with the documents before the question,
and at the same time asks for a title, tags and follow-up questions of the chat, in whole answers. The user stops one
stream, and asks on. LiteLLM's proxy checks the server's health by a short answer, and hands requests on with OpenAI's
client: chats and text completions, whole and streamed, with token counts. Prints what was reused; exits with 1 if some
answer is not what these programs expect.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

OPEN_WEBUI = """### Task:
Respond to the user query using the provided context, incorporating inline citations in the format [id] **only when \
the <source> tag includes an explicit id attribute** (e.g., <source id="1">).

<context>
{context}
</context>

{question}"""
"""Its prompt for documents: the shape matters here, not every word."""
BESIDE = {
    "title": "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.",
    "tags": "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.",
    "follow-ups": "### Task:\nSuggest 3-5 relevant follow-up questions based on the chat history.",
}


class Unexpected(Exception):
    """An answer is not what the program expects."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--document", type=Path, action="append", required=True, help="text of a stored chunk")
    args = parser.parse_args()
    documents = [path.read_text().strip() for path in args.document]
    try:
        found = asyncio.run(play(args.address, documents, args.key))
    except Unexpected as error:
        sys.exit(f"not as expected: {error}")
    print(json.dumps(found, indent=1))


async def play(address: str, documents: Sequence[str], key: str = "none", max_tokens: int = 24) -> dict[str, Any]:
    """All requests of both; returns hits of stored chunks by name of the request. Raises Unexpected."""
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{address}/v1", headers=headers, timeout=600) as client:
        model = (await get(client, "models"))["data"][0]["id"]
        return {
            **await open_webui(client, model, documents, max_tokens),
            **await litellm(client, model, documents, max_tokens),
        }


async def open_webui(client: httpx.AsyncClient, model: str, documents: Sequence[str], most: int) -> dict[str, Any]:
    sources = "\n".join(f'<source id="{n}" name="doc{n}.txt">{text}</source>' for n, text in enumerate(documents, 1))
    asked = {"role": "user", "content": OPEN_WEBUI.format(context=sources, question="What is this about?")}
    body = {"model": model, "messages": [asked], "stream": True, "max_tokens": most, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    history = f"### Chat History:\n<chat_history>\nUSER: What is this about?\n\n{sources}\n</chat_history>"
    beside = [
        whole(
            client,
            "chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": f"{task}\n{history}"}],
                "stream": False,
                "max_completion_tokens": most,
            },
        )
        for task in BESIDE.values()
    ]
    answer, *others = await asyncio.gather(streamed(client, body), *beside)
    for name, other in zip(BESIDE, others, strict=True):
        check(isinstance(other["choices"][0]["message"]["content"], str), f"the {name} has no text", other)
    stopped = await streamed(client, body, stop_after=2)
    check(stopped["text"], "a stream that is stopped began with no text", stopped)
    said = {"role": "assistant", "content": answer["text"]}
    again = {**body, "messages": [asked, said, {"role": "user", "content": "And who wrote it?"}]}
    later = await streamed(client, again)
    check(later["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"], "the history is missing", later)
    found = {"answer": answer["hits"], "later turn": later["hits"]}
    found |= {name: hits(other) for name, other in zip(BESIDE, others, strict=True)}
    return {f"Open WebUI, {name}": value for name, value in found.items()}


async def litellm(client: httpx.AsyncClient, model: str, documents: Sequence[str], most: int) -> dict[str, Any]:
    health = {"model": model, "messages": [{"role": "user", "content": "Hey how's it going?"}], "max_tokens": 5}
    await whole(client, "chat/completions", health)
    text = "\n\n".join([*documents, "Question: What is this about?"])
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": most, "temperature": 0}
    body |= {"user": "u-1", "n": 1, "extra_body": None, "stop": ["</answer>"]}
    del body["extra_body"]  # its client merges this into the body
    chat = await whole(client, "chat/completions", body)
    usage = chat["usage"]
    check(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"], "token counts", usage)
    stream = await streamed(client, {**body, "stream": True, "stream_options": {"include_usage": True}})
    check(stream["text"] == (chat["choices"][0]["message"]["content"] or ""), "stream and whole answer differ", stream)
    completion = await whole(client, "completions", {"model": model, "prompt": text, "max_tokens": most})
    check(isinstance(completion["choices"][0]["text"], str), "a completion has no text", completion)
    found = {"chat": hits(chat), "stream": stream["hits"], "completion": hits(completion)}
    return {f"LiteLLM, {name}": value for name, value in found.items()}


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    response = await client.get(path)
    check(response.status_code == 200, f"GET {path}", response.text)
    return dict(response.json())


async def whole(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    check(response.status_code == 200, f"POST {path}", response.text)
    return dict(response.json())


async def streamed(client: httpx.AsyncClient, body: dict[str, Any], stop_after: int | None = None) -> dict[str, Any]:
    """Text, token counts and hits of a stream, of which the client reads so many pieces of text."""
    text, pieces, last, usage, found = "", 0, "", {}, None
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Unexpected(f"a stream has status {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last == "[DONE]":
                break
            event = json.loads(last)
            usage, found = event.get("usage") or usage, hits(event) if "cacheclip" in event else found
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                text, pieces = text + piece, pieces + bool(piece)
            if stop_after is not None and pieces >= stop_after:
                return {"text": text}
    check(last == "[DONE]" and usage, "a stream does not end with token counts and [DONE]", last)
    return {"text": text, "usage": usage, "hits": found}


def hits(answer: dict[str, Any]) -> int | None:
    return (answer.get("cacheclip") or {}).get("hits")


def check(holds: object, what: str, found: object) -> None:
    if not holds:
        raise Unexpected(f"{what}: {str(found)[:500]}")


if __name__ == "__main__":
    main()
