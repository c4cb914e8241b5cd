"""Chat templates as syntax trees that count what they do. A template comes with a model, and a model may come from
anywhere: loops in loops would run for hours, and texts that are doubled, repeated or padded would fill the memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

CHARACTERS = 1_000
"""Characters, or values, that are written in one step."""
_BITS = 64
"""Bits of a whole number that are computed in one step."""
_MOST_VALUES = 2_000_000
"""In a list or an object. A request may have a tenth of it."""
_PRODUCTS = frozenset(
    {
        *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "to_bytes"),
        *("join", "format", "format_map", "translate", "map", "tojson"),
    }
)
"""Filters and methods whose results may be as large as the product of their arguments; ``replace`` is another."""
_NUMBER = re.compile(r"\d+")
Step = Callable[..., Any]
"""Counts a number of steps, and what a value takes, and gives the value back."""


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
    """A template as a syntax tree in which every pass of a loop, every call and every text that is made counts its
    steps, by the function of path ``step`` (:data:`Step`). Transformers takes it in place of the text, and compiles it
    once: the same text gives the same tree. Raises jinja2.TemplateSyntaxError."""
    counting = _Counting(step)
    tree = counting.visit(_SYNTAX.parse(template))
    with_bodies: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
    for node in with_bodies:
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        count = counting.call(step, nodes.Const(True), nodes.Const(1 + written // CHARACTERS))
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(counting.call(step, nodes.Const(True), nodes.Const(1)), node.test, lineno=node.lineno)
    return tree


def variables_of(templates: Iterable[str]) -> frozenset[str]:
    """Names that chat templates read and do not set before. None of a template that cannot be read."""
    names: set[str] = set()
    for template in templates:
        with suppress(TemplateSyntaxError, RecursionError):
            names |= meta.find_undeclared_variables(_SYNTAX.parse(template))
    return frozenset(names)


def render_chat_template(messages: Any, **options: Any) -> str:
    """Messages as text, as transformers' tokenizers make it.

    Args:
        options: ``chat_template``, ``add_generation_prompt``, ``tools``, and variables of the template.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], **options)
    return str(texts[0])


class _Counting(NodeTransformer):
    """Lets a template's expressions count what they make."""

    def __init__(self, step: str) -> None:
        self._step = step

    def call(self, function: str, *arguments: nodes.Expr, of: nodes.Call | nodes.Filter | None = None) -> nodes.Call:
        """A call of a function of ours, with the arguments of another call after its own."""
        rest: tuple[Any, ...] = ([], [], None, None) if of is None else (of.args, of.kwargs, of.dyn_args, of.dyn_kwargs)
        line = 1 if of is None else of.lineno
        return nodes.Call(nodes.ImportedName(function), [*arguments, *rest[0]], *rest[1:], lineno=line)

    def _own(self, function: Callable[..., Any], *arguments: nodes.Expr, of: Any = None) -> nodes.Call:
        return self.call(f"{__name__}.{function.__name__}", nodes.ImportedName(self._step), *arguments, of=of)

    def visit_Call(self, node: nodes.Call) -> nodes.Call:
        self.generic_visit(node)
        return self._own(template_call, nodes.ContextReference(), node.node, of=node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self.generic_visit(node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Call:
        self.generic_visit(node)
        assert node.node is not None, "blocks that are filtered were rewritten"
        return self._own(template_filter, nodes.ContextReference(), nodes.Const(node.name), node.node, of=node)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Scope:
        """As a text that is kept, and written with the filters."""
        kept = nodes.AssignBlock(nodes.Name(_KEPT, "store"), None, node.body)
        written = nodes.Output([_filtered(node.filter, nodes.Name(_KEPT, "load"))])
        return self.visit(nodes.Scope([kept, written]).set_lineno(node.lineno))  # type: ignore[no-any-return]

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> Any:
        if node.filter is None:
            return self.generic_visit(node)
        kept = nodes.AssignBlock(nodes.Name(_KEPT, "store"), None, node.body)
        set_again = nodes.Assign(node.target, _filtered(node.filter, nodes.Name(_KEPT, "load")))
        return [self.visit(each.set_lineno(node.lineno)) for each in (kept, set_again)]

    def _operation(self, node: nodes.BinExpr) -> nodes.Call:
        self.generic_visit(node)
        return self._own(template_operation, nodes.Const(node.operator), node.left, node.right)

    visit_Add = visit_Mul = visit_Mod = visit_Pow = _operation

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [self.call(self._step, each) for each in node.nodes]
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        is_text = (nodes.TemplateData, nodes.Const)
        node.nodes = [each if isinstance(each, is_text) else self.call(self._step, each) for each in node.nodes]
        return node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return self.call(self._step, node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return node if node.ctx == "store" else self.call(self._step, node)


_KEPT = "cacheclip_kept"
"""Name of a text in a template that is not of the template."""


def _filtered(filters: nodes.Filter, value: nodes.Expr) -> nodes.Filter:
    """Filters of a block, on a value."""
    first = filters
    while first.node is not None:
        assert isinstance(first.node, nodes.Filter)
        first = first.node
    first.node = value
    return filters


def template_call(step: Step, context: Any, called: Any, /, *arguments: Any, **named: Any) -> Any:
    """A call in a template, counted before it is made: of methods of texts and numbers, what they will write."""
    owner = getattr(getattr(called, "__wrapped__", called), "__self__", None)  # jinja wraps str.format
    if isinstance(owner, str | bytes | int | list | tuple | dict):
        _count(step, called.__name__, owner, arguments, named)
        arguments = tuple(_counted_items(step, each, owner) for each in arguments)
    return step(context.environment.call(context, called, *arguments, **named))


def template_filter(step: Step, context: Any, name: str, value: Any, /, *arguments: Any, **named: Any) -> Any:
    """A filter, counted before it is applied."""
    _count(step, name, value, arguments, named)
    value = _counted_items(step, value, arguments[0] if name == "join" and arguments else "")
    return step(context.environment.call_filter(name, value, arguments, named, context, context.eval_ctx))


def template_operation(step: Step, sign: str, left: Any, right: Any) -> Any:
    """``left + right``, ``*``, ``%`` or ``**``, counted before it is computed."""
    numbers = isinstance(left, int) and isinstance(right, int)
    if sign == "%" and isinstance(left, str):
        _count(step, "format", left, (right,), {})
    elif sign == "*" and not numbers:
        step(None, _size(left) * _size(right) // CHARACTERS)
    elif sign in ("*", "**") and numbers:
        bits = left.bit_length() * abs(right) if sign == "**" else left.bit_length() + right.bit_length()
        step(None, bits // _BITS)
    return step(_OPERATIONS[sign](left, right))


_OPERATIONS = {"+": operator.add, "*": operator.mul, "%": operator.mod, "**": operator.pow}


def _count(step: Step, name: str, value: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Count what a filter or a method will write at most."""
    others = [*arguments, *named.values()]
    if name == "replace" and isinstance(value, str) and len(others) > 1:
        size = len(value) + (len(value) // max(1, _size(others[0])) + 1) * _size(others[1])
    elif name in _PRODUCTS:
        numbers = map(int, _NUMBER.findall(value[:10_000])) if "format" in name and isinstance(value, str) else ()
        size = prod(map(_size, others)) * max(_size(value), *numbers, 1)
    else:
        size = max(map(_size, others), default=0)
    step(None, size // CHARACTERS)


def _counted_items(step: Step, value: Any, between: Any) -> Any:
    """A value; of an iterator, the same one, whose items count, each with what is written between them."""
    if not isinstance(value, Iterator):
        return value
    more = len(between) // CHARACTERS if isinstance(between, str | bytes) else 0
    return (step(each, 1 + more) for each in value)


def _size(value: Any) -> int:
    """How much an argument may make of a result."""
    if isinstance(value, str | bytes | range):
        return max(1, len(value))
    if isinstance(value, int):
        return max(1, abs(value))
    widths = (abs(each) for each in value if isinstance(each, int)) if isinstance(value, list | tuple) else ()
    return max(1, *widths, weight(value)) if isinstance(value, list | tuple | dict) else 1


def weight(value: Any) -> int:
    """Values and characters in a list or an object, those that stand in it twice counted twice. Large ones are counted
    up to a limit that no chat reaches."""
    count, size, ahead = 0, 0, [value]
    while ahead:
        each = ahead.pop()
        count, size = count + 1, size + 1
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            ahead.extend(chain.from_iterable(each.items()))
        elif isinstance(each, list | tuple):
            ahead.extend(each)
        if count > _MOST_VALUES:
            return _MOST_VALUES * CHARACTERS
    return size
