"""What the readers of a script's syntax tree share."""

from __future__ import annotations

import ast


def callee(function: ast.expr) -> tuple[str, str]:
    """(name, owner) of f, a.f, a.b.f."""
    if isinstance(function, ast.Name):
        return function.id, ""
    if isinstance(function, ast.Attribute):
        return function.attr, callee(function.value)[0]
    return "", ""
