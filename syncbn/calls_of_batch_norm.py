"""Finds calls of torch's batch norm in the source of a class, which a conversion of layers does not change."""

import ast
import inspect
import textwrap
from tokenize import TokenError
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

FUNCTIONS = nn.functional.batch_norm, torch.batch_norm, torch.native_batch_norm
NAMES = "batch_norm", "native_batch_norm"
TRAINING = 5  # the place of the argument `training` in all of them
# Raised for a function that has no source or wraps itself, and for source that is incomplete or nested too deeply.
UNREADABLE = OSError, SyntaxError, TokenError, ValueError, RecursionError, MemoryError


def calls_batch_norm(kind: type) -> bool:
    """Whether a method of the class, inherited ones too, refers to one of FUNCTIONS by the name of a global or by its
    own name in a module, other than to call it with training=False. A method without source is left out."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return any(_may_train(value) for value in values if isinstance(value, (FunctionType, staticmethod, classmethod)))


def _may_train(method: Any) -> bool:
    try:
        function = inspect.unwrap(method)
        if not isinstance(function, FunctionType) or str(function.__module__).split(".")[0] == "torch":
            return False
        names = function.__globals__
        if not _names_batch_norm(function.__code__, names):  # reading its source would be slow
            return False
        # textwrap.dedent would leave a method indented if a comment in it is not.
        source = textwrap.indent(inspect.getsource(function), " ")
        nodes = list(ast.walk(ast.parse(f"if True:\n{source}")))
        evaluated = {part for node in nodes if isinstance(node, ast.Call) for part in _evaluated(node)}
        return any(_is_batch_norm(_value(node, names)) for node in nodes if node not in evaluated)
    except UNREADABLE:
        return False


def _names_batch_norm(code: CodeType, names: dict[str, object]) -> bool:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    named = any(name in NAMES or _is_batch_norm(names.get(name)) for name in code.co_names)
    return named or any(_names_batch_norm(one, names) for one in inner)


def _is_batch_norm(value: object) -> bool:
    return any(value is function for function in FUNCTIONS)


def _value(node: ast.AST, names: dict[str, object]) -> object:
    """What the name of a global or an attribute of a module refers to."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, names)
        return vars(owner).get(node.attr) if isinstance(owner, ModuleType) else None
    return None


def _evaluated(call: ast.Call) -> list[ast.expr]:
    """What gets training=False from a call: the function, also by default, and if by name the arguments too, as in
    partial(F.batch_norm, training=False)."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == "training"]
    others = [keyword.value for keyword in call.keywords if keyword.arg is None]  # **options
    others += [value for place, value in enumerate(call.args) if place == TRAINING or isinstance(value, ast.Starred)]
    if any(not isinstance(value, ast.Constant) or value.value is not False for value in named or others):
        return []
    return [call.func, *call.args] if named else [call.func]
