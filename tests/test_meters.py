"""Meters of the package's size. Each number only falls: a change that lets one rise says why in its commit."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from cacheclip_testing import names_outside_the_door
from cacheclip_testing.door import PUBLIC
from scripts import ROOT as REPOSITORY, script

from cacheclip_rag import CacheClipEngine
from tests.conftest import CHUNKS
from tests.test_imports import MODULES, imported, layer_of, tree

pytestmark = pytest.mark.usefixtures("no_garbage")


MOST_FILES, MOST_FUNCTIONS = 49, 320
"""That one ``generate`` passes (``cacheclip``, four hits)."""
MOST_CODE = 17_403
"""Lines of the core without imports, docstrings, comments and blank lines."""
MOST_LARGE = (12, 3, 0)
"""Classes with more than 15 methods, files of more than 450 lines, functions of more than 60, in core and guests."""
MOST_TEST_LINES = (29_140, 58_540)
"""Lines of the core's tests, and of all tests."""
MOST_UPWARD_IMPORTS = 0
MOST_MODULES_IN_CIRCLES = 0
LARGEST_CIRCLE = 0
MOST_DEEP_NAMES = 2
"""Names that docs, examples and benchmarks take from modules that are not public."""
MOST_INNER_NAMES_OF_GUESTS_TESTS = 46
"""Names that tests of guests take from outside the door."""
MOST_GUESTS_IN_CORE_TESTS = 29
"""Modules of guests that tests of the core import."""
MOST_SHARED_CLASS_NAMES = 2
MOST_VAGUE_NAMES = 3
"""Uses of variables that are called ``given`` or ``found``, whatever was given or found."""


def all_imports(module: str) -> set[str]:
    """Modules of the package that a module names in imports: at import time, in functions, for type checkers."""
    statements = (node for node in ast.walk(tree(module)) if isinstance(node, ast.Import | ast.ImportFrom))
    return {name for node in statements for name in imported(module, node)} - {module}


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of nodes that all reach one another, largest first."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        found, ahead = set(), [start]
        while ahead:
            new = set(graph.get(ahead.pop(), ())) - found
            found |= new
            ahead.extend(new)
        reached[start] = found
    found_circles: list[set[str]] = []
    for node in graph:
        circle = {other for other in reached[node] if node in reached.get(other, ())}
        if circle and circle not in found_circles:
            found_circles.append(circle)
    return sorted(found_circles, key=len, reverse=True)


def shared_names(files: Iterable[Path]) -> dict[str, list[str]]:
    """Files of every class name that stands twice or more, a leading underscore apart."""
    found = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(file.relative_to(REPOSITORY)))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def vague_names(module: ast.Module) -> int:
    """Uses of variables and parameters with a name that any of them could have."""
    nodes = (node for node in ast.walk(module) if isinstance(node, ast.Name | ast.arg))
    return sum((node.id if isinstance(node, ast.Name) else node.arg) in ("given", "found") for node in nodes)


def deep_names(text: str) -> set[str]:
    """Names that a page or a program imports, or documents, from modules of the package that are not public."""
    found = {tuple(name.rpartition(".")[::2]) for name in re.findall(r"::: cacheclip_rag\.([\w.]+)", text)}
    statement = r"from cacheclip_rag((?:\.\w+)*) import (\([^)]*\)|[^\n#]*)"
    for module, names in re.findall(statement, text):
        found |= {(module.lstrip("."), name) for name in re.findall(r"(\w+)(?: as \w+)?", names)}
    return {f"{module}.{name}" for module, name in found if module not in PUBLIC}


def lines_of_code(path: Path) -> int:
    """Lines of a module without imports, docstrings, comments and blank lines."""
    text = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        text_of = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
        if isinstance(text_of, str) or isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in left_out
        for number, line in enumerate(text.splitlines(), 1)
    )


def large(files: Iterable[Path]) -> tuple[int, int, int]:
    """Classes with more than 15 methods, files of more than 450 lines, functions of more than 60."""
    classes = long_files = functions = 0
    for file in files:
        text = file.read_text(encoding="utf-8")
        long_files += len(text.splitlines()) > 450
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            functions += is_function and (node.end_lineno or 0) - node.lineno >= 60
            if isinstance(node, ast.ClassDef):
                classes += sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) > 15
    return classes, long_files, functions


def python_files(*folders: str, of_tests: bool = False) -> list[Path]:
    """Of the package and the distributions beside it: without tests, or tests alone."""
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")]
    return [file for file in files if ("tests" in file.relative_to(REPOSITORY).parts) is of_tests]


class TestSize:
    def test_code_of_the_core(self) -> None:
        assert 0 < sum(map(lines_of_code, python_files("cacheclip_rag"))) <= MOST_CODE

    def test_code_is_counted(self, tmp_path: Path) -> None:
        (tmp_path / "a.py").write_text(
            '"""Text."""\nimport os\n\n# a note\nx = """\nkept\n"""\n\ndef f():\n    """Text."""\n'
        )
        assert lines_of_code(tmp_path / "a.py") == 4

    def test_large_classes_files_and_functions(self) -> None:
        found = large(python_files("cacheclip_rag", "integrations"))
        assert all(one <= most for one, most in zip(found, MOST_LARGE, strict=True)), found

    def test_lines_of_tests(self) -> None:
        files = [python_files(*folders, of_tests=True) for folders in (["tests"], ["tests", "integrations"])]
        found = tuple(sum(len(file.read_text(encoding="utf-8").splitlines()) for file in each) for each in files)
        assert all(0 < one <= most for one, most in zip(found, MOST_TEST_LINES, strict=True)), found


class TestOneAnswer:
    def test_files_and_functions(self, tiny_models: dict[str, str], tmp_path: Path) -> None:
        meter = script("benchmarks/opened_by_generate.py")
        models = {"primary": tiny_models["llama"], "auxiliary": tiny_models["auxiliary"]}
        engine = CacheClipEngine(**models, store=tmp_path, method="cacheclip")
        found = meter.opened_by(engine, CHUNKS)
        functions = sum(map(len, found.values()))
        assert 0 < len(found) <= MOST_FILES and functions <= MOST_FUNCTIONS, (len(found), functions)


class TestImports:
    def test_upward(self) -> None:
        upward = {(m, name) for m in MODULES for name in all_imports(m) if layer_of(name) > layer_of(m)}
        assert len(upward) <= MOST_UPWARD_IMPORTS, sorted(upward)

    def test_circles(self) -> None:
        found = circles({module: all_imports(module) for module in MODULES})
        assert len(found[0] if found else ()) <= LARGEST_CIRCLE, [sorted(each) for each in found]
        assert sum(map(len, found)) <= MOST_MODULES_IN_CIRCLES, [sorted(each) for each in found]

    def test_circles_are_seen(self) -> None:
        assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
        two = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"e"}, "e": {"f"}, "f": {"d"}}
        assert circles(two) == [{"d", "e", "f"}, {"b", "c"}]


class TestPublicModules:
    def test_docs_examples_and_benchmarks_import_from_no_other(self) -> None:
        files = [REPOSITORY / "README.md"]
        files += [file for folder in ("docs", "examples", "benchmarks") for file in (REPOSITORY / folder).rglob("*.*")]
        texts = [file.read_text(encoding="utf-8") for file in files if file.suffix in (".md", ".py")]
        found = {name for text in texts for name in deep_names(text)}
        assert len(found) <= MOST_DEEP_NAMES, sorted(found)

    def test_tests_of_guests_enter_by_the_door(self) -> None:
        """As their modules do, but for these names."""
        folders = REPOSITORY.glob("integrations/*/tests")
        found = {folder.parent.name: names_outside_the_door(folder) for folder in folders}
        assert len(found) > 7
        assert sum(map(len, found.values())) <= MOST_INNER_NAMES_OF_GUESTS_TESTS, found

    def test_tests_of_the_core_import_few_guests(self) -> None:
        guests = r"cacheclip_(?!rag\b|testing\b)[\w.]+|langchain_cacheclip[\w.]*|llama_index\.[\w.]*cacheclip[\w.]*"
        statement = rf"^\s*(?:from|import) ({guests})"
        found = {
            f"{file.relative_to(REPOSITORY)}: {name}"
            for file in (REPOSITORY / "tests").rglob("*.py")
            for name in re.findall(statement, file.read_text(encoding="utf-8"), re.MULTILINE)
        }
        assert 0 < len(found) <= MOST_GUESTS_IN_CORE_TESTS, sorted(found)

    def test_deep_names_are_seen(self) -> None:
        text = """
from cacheclip_rag import Plan
from cacheclip_rag.store import ChunkStore
    from cacheclip_rag.store.care import verify  # in a function
from cacheclip_rag.errors import (
    StoreError,
    CacheClipError as Error,
)
::: cacheclip_rag.methods.Method
::: cacheclip_rag.methods.base.Method
"""
        assert deep_names(text) >= {"store.care.verify", "errors.StoreError", "errors.CacheClipError"}
        assert not {"store.ChunkStore", ".Plan", "methods.Method"} & deep_names(text)
        assert "methods.base.Method" in deep_names(text)


def test_class_names() -> None:
    shared = shared_names(python_files("cacheclip_rag", "integrations"))
    assert len(shared) <= MOST_SHARED_CLASS_NAMES, shared


class TestVagueNames:
    def test_they_fall(self) -> None:
        assert sum(vague_names(tree(module)) for module in MODULES) <= MOST_VAGUE_NAMES

    def test_they_are_seen(self) -> None:
        text = "def say(given, **found):\n    other.found = [given for given in found]\n    return find(found=other)"
        assert vague_names(ast.parse(text)) == 5
