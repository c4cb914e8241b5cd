"""What this distribution takes from others, and who of it needs vLLM."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import cacheclip_serve
import cacheclip_vllm
from cacheclip_testing import names_outside_the_door
from import_statements import at_import_time

FOLDER = Path(cacheclip_vllm.__file__).parent
LOADED_BY_VLLM = {"capturing", "connector", "rows"}
"""Modules that import vLLM at once."""


def imports(text: str) -> set[str]:
    """Modules that a module imports, those of its own package with a dot before their names."""
    found: set[str] = set()
    for node in at_import_time(ast.parse(text).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.level and node.module is None:
            found |= {f".{alias.name}" for alias in node.names}
        else:
            found.add("." * node.level + (node.module or ""))
    return found


def loads_vllm(texts: dict[str, str]) -> set[str]:
    """Modules, by name, that import vLLM, or one that does."""
    found = {name for name, text in texts.items() if any(each.split(".")[0] == "vllm" for each in imports(text))}
    while more := {name for name in {*texts} - found if {f".{each}" for each in found} & imports(texts[name])}:
        found |= more
    return found


def test_only_what_vllm_loads_imports_vllm() -> None:
    """At import time. What else is for vLLM works, and is tested, without it."""
    assert loads_vllm({path.stem: path.read_text() for path in FOLDER.glob("*.py")}) == LOADED_BY_VLLM


def test_imports_of_vllm_are_seen() -> None:
    texts = {
        "direct": "from vllm.logger import init_logger",
        "tried": "try:\n    import vllm\nexcept ImportError:\n    pass",
        "through": "from .direct import init_logger",
        "late": "def f():\n    import vllm",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .direct import init_logger",
        "ours": "from cacheclip_vllm.late import f",
    }
    assert loads_vllm(texts) == {"direct", "tried", "through"}


def test_the_core_is_entered_by_its_door() -> None:
    assert names_outside_the_door(FOLDER) == set()


def test_the_server_too() -> None:
    """By what its package itself names."""
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cacheclip_serve":
                assert node.module == "cacheclip_serve", path.name
                assert {alias.name for alias in node.names} <= {*cacheclip_serve.__all__}, path.name


def test_public_names_are_there() -> None:
    for name in cacheclip_vllm.__all__:
        assert inspect.getdoc(getattr(cacheclip_vllm, name)), name
