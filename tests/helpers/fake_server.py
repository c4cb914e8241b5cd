"""A server that remembers what it is asked and says what it is told, for tests of adapters with ``base_url``."""

import json
import threading
from dataclasses import MISSING, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cacheclip_rag import FusionStats


class FakeServer(ThreadingHTTPServer):
    """Answers every question with the stream :attr:`says`, in pieces of :attr:`size` bytes. What it says of its model,
    in :attr:`cards`, is that of a server of this package.

    >>> with FakeServer() as server:
    ...     server.say("Twelve metres.")
    ...     adapter = MyAdapter(base_url=server.url)
    ...     adapter.ask("How tall is it?")
    ...     server.bodies[-1]["messages"]
    """

    STATS: dict[str, Any] = {  # noqa: RUF012
        **{each.name: "full" if each.type == "str" else 3 for each in fields(FusionStats) if each.default is MISSING},
        "phases_s": {},
        "fallback": None,
    }
    """Statistics of its answers."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the questions, in order."""
        self.size = 1000
        own = {"uses_tools": False, "can_constrain": False}
        self.cards = json.dumps({"data": [{"id": "m", "max_model_len": 4096, "cacheclip": own}]}).encode()
        self.says = b""
        self.say("Twelve metres.")
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(10)
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def say(self, text: str, *, reason: str = "stop", reasoning: str = "") -> None:
        """Let the next answers have this text, in two pieces, after this reasoning."""
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        thought = [{"reasoning_content": piece} for piece in (reasoning[:3], reasoning[3:]) if piece]
        deltas = [*thought, *({"content": piece} for piece in (text[:4], text[4:]))]
        chunks: list[dict[str, Any]] = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
        ]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {"prompt_tokens": 3, "completion_tokens": 5}
        chunks.append({**head, "choices": [], "usage": usage, "cacheclip": self.STATS})
        sent = [json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() for chunk in chunks]
        self.says = b"".join(b"data: " + each + b"\n\n" for each in (*sent, b"[DONE]"))


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(self.server.cards)))
        self.end_headers()
        self.wfile.write(self.server.cards)

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for at in range(0, len(self.server.says), self.server.size):
            self.wfile.write(self.server.says[at : at + self.server.size])
            self.wfile.flush()
