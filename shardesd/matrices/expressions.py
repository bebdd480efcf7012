"""Sizes and conditions of layouts as text: ``heads * head_dim``, ``multi_query and not new_decoder_architecture``.

Names, whole numbers, ``+ - * /`` (exact division), comparisons, ``and``, ``or``, ``not`` and brackets; nothing else is
understood, and nothing is ever executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

LONGEST = 200
"""Characters of one expression."""
_LARGEST = 1 << 50

Lookup = Callable[[str], Any]
"""The value of a (dotted) name: an int, a bool or a text; None where it isn't known."""

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Unknown(Exception):
    """The value can't be had; `str` says why: ``config.json lacks num_attention_heads``."""


@lru_cache(maxsize=1024)
def parse(text: str) -> ast.expr:
    """The expression in `text`, checked. Raises ValueError, with one line that says what is wrong."""
    if len(text) > LONGEST:
        raise ValueError(f"'{text[:40]}…' is longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"'{text}' is not an expression") from None
    for node in ast.walk(tree):
        if not _known(node):
            raise ValueError(f"'{text}': only names, whole numbers, + - * /, comparisons, and, or, not are understood")
    return tree


def size(text: str, lookup: Lookup) -> int:
    """A whole number above 0. Raises `Unknown`."""
    value = _value(parse(text), lookup)
    if type(value) is not int or not 0 < value < _LARGEST:
        raise Unknown(f"{text} is {value}")
    return value


def holds(text: str, lookup: Lookup) -> bool:
    """Whether a condition holds. Raises `Unknown`."""
    return bool(_value(parse(text), lookup))


def _known(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, str, bool)
    kinds = (ast.Name, ast.Attribute, ast.BinOp, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.And, ast.Or, ast.Not)
    return isinstance(node, (*kinds, ast.Div, ast.Load, *_ARITHMETIC, *_COMPARISONS))


def _value(node: ast.expr, lookup: Lookup) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        name = ast.unparse(node)
        value = lookup(name)
        if value is None:
            raise Unknown(f"config.json lacks {name}")
        return value
    if isinstance(node, ast.BoolOp):
        found = (bool(_value(part, lookup)) for part in node.values)
        return all(found) if isinstance(node.op, ast.And) else any(found)
    if isinstance(node, ast.UnaryOp):
        return not _value(node.operand, lookup)
    try:
        if isinstance(node, ast.Compare):
            values = [_value(part, lookup) for part in (node.left, *node.comparators)]
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
        assert isinstance(node, ast.BinOp)
        return _arithmetic(node, _value(node.left, lookup), _value(node.right, lookup))
    except TypeError:
        raise Unknown(f"{ast.unparse(node)} has no value") from None


def _arithmetic(node: ast.BinOp, a: Any, b: Any) -> int:
    if type(a) is not int or type(b) is not int or max(abs(a), abs(b)) > _LARGEST:
        raise Unknown(f"{ast.unparse(node)} is no whole number")
    if not isinstance(node.op, ast.Div):
        return _ARITHMETIC[type(node.op)](a, b)
    if b == 0 or a % b:
        raise Unknown(f"{ast.unparse(node)} = {a} / {b} is no whole number")
    return a // b
