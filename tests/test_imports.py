"""Who imports whom: imports point downwards, in no circle, and the core runs without its guests."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from import_statements import at_import_time

import cacheclip_rag
from cacheclip_rag import CacheClipEngine, SamplingParams
from tests.conftest import CHUNKS, rag_prompt

pytestmark = pytest.mark.usefixtures("no_garbage")

PACKAGE = "cacheclip_rag"
ROOT = Path(cacheclip_rag.__file__).parent

LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("finding", "sampling"),
    ("store",),
    # the protocol of a running model; transformers' internals
    ("runtime",),
    ("prompt",),
    ("chunks",),
    ("selection",),
    ("methods",),
    ("config",),
    ("plan",),
    ("fusion",),
    ("models", "types"),
    ("guards",),
    ("answering",),
    ("engine", "planning"),
    ("adapters",),
    # the package itself: the names of its façade
    ("",),
    ("measuring",),
    ("cli",),
    ("plugins",),
)
"""Rooms of the package from bottom to top: a module may import from its own room and from those below it."""


def modules() -> dict[str, Path]:
    """Path of every module, by its name within the package; the package itself is the empty name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Modules of the package that a statement names, whether they exist or not."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        start = node.module or ""
        if node.level:
            package = f"{PACKAGE}.{module}".strip(".").split(".")
            if MODULES[module].name != "__init__.py":
                package.pop()
            kept = package[: len(package) - node.level + 1]
            start = ".".join([*kept, *([node.module] if node.module else [])])
        names = [f"{start}.{alias.name}" for alias in node.names]
    for name in names:
        if name.split(".")[0] == PACKAGE:
            inside = name[len(PACKAGE) + 1 :]
            # what is imported from a module may be a name in it
            yield inside if inside in MODULES else inside.rpartition(".")[0]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the package that importing this one imports directly, packages on the way to them included."""
    found = set()
    own = {"", *(".".join(module.split(".")[:n]) for n in range(1, module.count(".") + 2))}
    for node in at_import_time(tree(module).body):
        for name in imported(module, node):
            found.add(name)
            parts = name.split(".")
            found |= {".".join(parts[:n]) for n in range(1, len(parts))} - own
    return frozenset(found - {module})


def layer_of(module: str) -> int:
    """The layer of the longest name that the module's own begins with."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"{module!r} belongs to no layer")


def test_every_module_has_a_layer() -> None:
    assert all(layer_of(module) >= 0 for module in MODULES)
    with pytest.raises(AssertionError, match="belongs to no layer"):
        layer_of("elsewhere.module")


def test_no_circle() -> None:
    """No module is imported again by what it imports, at import time."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"circle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for name in sorted(imports_of(module)):
                visit(name, (*way, module))
            done.add(module)

    for module in sorted(MODULES):
        visit(module, ())


def test_the_check_sees_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upward and circular imports in a package made up for the purpose."""
    text = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ..engine import Engine
try:
    from ..methods.base import Method
except ImportError:
    from ..base import errors
def lazy():
    from ..engine import evaluation
"""
    names = [name for node in at_import_time(ast.parse(text).body) for name in imported("store.catalog", node)]
    assert names == ["methods.base", "base.errors"]
    assert layer_of("methods.base") > layer_of("store.catalog") > layer_of("base.errors")
    circle = {"store.keys": frozenset({"store.codecs"}), "store.codecs": frozenset({"store.keys"})}
    monkeypatch.setattr(sys.modules[__name__], "imports_of", lambda module: circle.get(module, frozenset()))
    with pytest.raises(AssertionError, match="circle: store.codecs -> store.keys -> store.codecs"):
        test_no_circle()


def guest_packages() -> list[str]:
    """Packages of the distributions in ``integrations/``, as they are imported."""
    folders = (path.parent for path in (ROOT.parent / "integrations").glob("*/pyproject.toml"))
    return sorted(each.name for folder in folders for each in folder.iterdir() if (each / "py.typed").is_file())


class TestGuests:
    """Distributions in ``integrations/`` are guests: they import the core, and the core never imports them."""

    def test_the_core_does_not_import_them(self) -> None:
        """Not even lazily, or for its types."""
        guests = guest_packages()
        assert {"cacheclip_lab", "cacheclip_serve", "langchain_cacheclip"} <= {*guests}
        for module in sorted(MODULES):
            names = re.findall(r"^\s*(?:from|import) (\w+)", MODULES[module].read_text(encoding="utf-8"), re.MULTILINE)
            assert not {*names} & {*guests}, module

    def test_an_engine_answers_without_them(self, engine: CacheClipEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor does anything by a name that is put together at run time."""
        guests = {*guest_packages()}
        for name in {*guests, *sys.modules}:
            if name.split(".")[0] in guests:
                monkeypatch.setitem(sys.modules, name, None)  # whoever imports it now gets an ImportError
        engine.precompute(CHUNKS)
        assert engine.generate(rag_prompt(CHUNKS), SamplingParams(max_tokens=2)).stats.hits == len(CHUNKS)
        with pytest.raises(ImportError):
            import cacheclip_lab.evaluation  # noqa: F401


def test_only_one_room_looks_into_transformers() -> None:
    """What lies in its submodules may move in any version."""
    inside = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
        if name.startswith("transformers.")
    }
    assert inside
    assert {module for module in inside if not module.startswith("runtime.transformers.")} == set()


class TestSpinning:
    """Torch's idle threads spin briefly, so that other programs can use the cores."""

    @staticmethod
    def spins(first: str, **environment: str) -> str:
        code = f"import os{first}, cacheclip_rag; print(os.environ.get('GOMP_SPINCOUNT', 'unset'))"
        own = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        ran = subprocess.run([sys.executable, "-c", code], env={**own, **environment}, capture_output=True, text=True)
        return ran.stdout.strip() or ran.stderr

    def test_briefly_by_default(self) -> None:
        assert self.spins("") == "1000"

    def test_as_the_caller_says(self) -> None:
        assert self.spins("", GOMP_SPINCOUNT="7") == "7"
        assert self.spins("", OMP_WAIT_POLICY="active") == "unset"

    @pytest.mark.long
    def test_unchanged_where_torch_has_read_it(self) -> None:
        assert self.spins(", torch") == "unset"


@pytest.mark.long
def test_optional_packages_wait_until_they_are_needed() -> None:
    """Clients of storage, and what traces."""
    optional = {"obstore", "deltalake", "pyarrow", "ray", "opentelemetry"}
    code = f"""
import sys, cacheclip_rag.store, cacheclip_rag.engine
from cacheclip_rag.guards.tracing import record_spans

record_spans(None, "m")
print({optional} & {{name.split(".")[0] for name in sys.modules}})
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_modules_of_earlier_names_stay() -> None:
    """Programs of users import them."""
    from cacheclip_rag import fusion, sampling, types

    assert sampling.SamplingParams is SamplingParams
    assert [getattr(types, name) for name in types.__all__] == [getattr(fusion.answer, name) for name in types.__all__]
