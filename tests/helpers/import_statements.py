"""Which imports of a module run when it is imported."""

import ast
from collections.abc import Iterator


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is imported: none in functions, none for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import_time(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from at_import_time(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from at_import_time(handler.body)
