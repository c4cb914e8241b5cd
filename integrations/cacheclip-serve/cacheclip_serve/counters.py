"""Counters of a server, beside those of its answers (:mod:`cacheclip_rag.guards.metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Counters:
    """What happened to requests. Used by one event loop."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Responses, by path and status."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Fields of requests that were not read, because they change nothing."""
    disconnects: int = 0
    """Requests whose client hung up before the end."""

    def count(self, path: str, status: int) -> None:
        self.requests[path, status] += 1

    def text(self, *, running: int, waiting: int) -> str:
        """In Prometheus' text format, with the numbers of questions that are being answered and that wait for their
        turn."""
        requests = [(f'path="{path}",status="{status}"', n) for (path, status), n in sorted(self.requests.items())]
        ignored = [(f'field="{name}"', n) for name, n in sorted(self.ignored.items())]
        return (
            exposition("http_requests_total", "counter", "Responses, by path and status.", requests)
            + exposition(
                "ignored_fields_total", "counter", "Requests with a field that was ignored, by field.", ignored
            )
            + exposition(
                "http_disconnects_total",
                "counter",
                "Requests whose client hung up before the end.",
                [("", self.disconnects)],
            )
            + exposition("questions_running", "gauge", "Questions that are being answered.", [("", running)])
            + exposition("questions_waiting", "gauge", "Questions that wait for their turn.", [("", waiting)])
        )


def exposition(name: str, kind: str, says: str, values: Iterable[tuple[str, float]]) -> str:
    """One metric in Prometheus' text format, its name prefixed with ``cacheclip_``. ``kind``: ``counter`` or ``gauge``;
    ``values``: each with its labels, such as ``path="/health"``, or an empty string."""
    lines = [f"# HELP cacheclip_{name} {says}", f"# TYPE cacheclip_{name} {kind}"]
    lines += [f"cacheclip_{name}{f'{{{labels}}}' if labels else ''} {value}" for labels, value in values]
    return "\n".join(lines) + "\n"
