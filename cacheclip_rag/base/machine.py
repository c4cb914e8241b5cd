"""Which processor this is, because measured seconds hold for one processor."""

from __future__ import annotations

import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def processor_name() -> str:
    """The processor's model, as the system calls it; ``unknown processor`` if it does not say."""
    with suppress(OSError):
        model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            return model[1]
    return platform.processor() or platform.machine() or "unknown processor"


@cache
def computes_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware: AVX-512 BF16 or AMX, or ARM's BF16 extension. Others
    emulate it, slower than float32."""
    with suppress(OSError):
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if flags:
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags[1].split())
    return False
