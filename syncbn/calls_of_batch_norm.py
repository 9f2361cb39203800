"""Finds calls of torch's batch norm in the code of a class, which a conversion of layers does not change."""

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

FUNCTIONS = nn.functional.batch_norm, torch.batch_norm, torch.native_batch_norm
TRAINING = 5  # the place of the argument `training` in all of them
LEFT_OUT = "torch", "syncbn"  # packages whose functions are not looked at


def calls_batch_norm(kind: type) -> bool:
    """Whether a function of the class, inherited and inner ones too, reads one of FUNCTIONS by the name of a global or
    of a module that is one, other than to call it with training=False."""
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    values += [value.__func__ for value in values if isinstance(value, (staticmethod, classmethod))]
    functions = [_unwrapped(value) for value in values if isinstance(value, FunctionType)]
    return any(
        _may_train(code, one.__globals__)
        for one in functions
        if isinstance(one, FunctionType) and str(one.__globals__.get("__name__")).split(".")[0] not in LEFT_OUT
        for code in _codes(one.__code__)
    )


def _unwrapped(function: FunctionType) -> object:
    try:
        return inspect.unwrap(function)
    except ValueError:  # it wraps itself
        return function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _may_train(code: CodeType, names: dict[str, object]) -> bool:
    value: object = None  # what the instruction has loaded, if that is a global or an attribute of a module
    instructions = list(dis.get_instructions(code))
    for index, instruction in enumerate(instructions):
        if instruction.opname == "LOAD_GLOBAL":
            value = names.get(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
            value = vars(value).get(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            value = None
        if any(value is one for one in FUNCTIONS) and not _is_evaluation(instructions[index + 1 :], code.co_consts):
            return True
    return False


def _is_evaluation(instructions: list[dis.Instruction], constants: tuple[Any, ...]) -> bool:
    """Whether these instructions call, with training=False, the function that was loaded before them.

    Argument i is made at depth i of the stack above the function. The call leaves its result at depth -1, in place of
    the function; an instruction that takes the function as an argument leaves less.
    """
    if instructions[0].opname == "PUSH_NULL":  # from Python 3.13 it may stand above the function
        instructions = instructions[1:]
    depth, at_targets, above = 0, dict[int, int](), list[tuple[int, dis.Instruction]]()
    for call in instructions:
        depth = at_targets.get(call.offset, depth)
        if call.opcode in dis.hasjrel:
            at_targets[call.argval] = depth + dis.stack_effect(call.opcode, call.arg, jump=True)
        after = depth + dis.stack_effect(call.opcode, call.arg, jump=False)
        if after < 0:
            break
        if call.opname not in ("PRECALL", "EXTENDED_ARG"):
            above.append((depth, call))
        depth = after
    if after != -1 or call.opname not in ("CALL", "CALL_KW") or not above:
        return False
    last = above[-1][1]
    keywords = constants[last.arg or 0] if last.opname == "KW_NAMES" or call.opname == "CALL_KW" else ()
    num_positional = (call.arg or 0) - len(keywords)
    if "training" not in keywords and num_positional <= TRAINING:
        return True  # by default
    place = num_positional + keywords.index("training") if "training" in keywords else TRAINING
    value = [one for depth, one in above if depth <= place][-1]
    jumps = [one for _, one in above if one.opcode in dis.hasjrel]
    is_conditional = any(jump.offset < value.offset < jump.argval for jump in jumps)
    return value.argval is False and not is_conditional
