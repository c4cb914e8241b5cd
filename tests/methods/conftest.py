from __future__ import annotations

from tests.fusion.conftest import case

__all__ = ["case"]
