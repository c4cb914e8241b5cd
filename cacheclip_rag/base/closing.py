"""``with``, for whatever has ``close``."""

from __future__ import annotations

from typing import Self


class Closing:
    """A ``with`` block closes it at its end, also after an error. It may be used again afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()  # type: ignore[attr-defined]  # of the class that inherits this
