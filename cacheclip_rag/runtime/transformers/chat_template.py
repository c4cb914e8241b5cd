"""Chat templates as syntax trees that count what they do. A template comes with a model, and a model may come from
anywhere: loops in loops would run for hours."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHARACTERS = 1_000
"""Characters of a template that are written in one step."""


class _Generation(Extension):
    """``{% generation %}``, which marks answers for training."""

    tags = {"generation"}  # noqa: RUF012 (jinja's form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_SYNTAX = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
"""The syntax of chat templates, as transformers has it."""


@lru_cache(maxsize=64)
def counted(template: str, step: str) -> Any:
    """A template as a syntax tree in which every pass of a loop and every call of a macro counts its steps, by the
    function of path ``step``, which returns True. Transformers takes it in place of the text, and compiles it once: the
    same text gives the same tree. Raises jinja2.TemplateSyntaxError."""
    tree = _SYNTAX.parse(template)
    with_bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
    for node in with_bodies:
        line = node.lineno

        def call(steps: int, line: int = line) -> nodes.Call:
            of = nodes.Const(steps, lineno=line)
            return nodes.Call(nodes.ImportedName(step, lineno=line), [of], [], None, None, lineno=line)

        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(call(1 + written // _CHARACTERS), lineno=line))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(call(1), node.test, lineno=line)
    return tree
