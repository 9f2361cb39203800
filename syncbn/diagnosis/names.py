"""Finds the path of a layer in the model that calls it, layer4.1.bn3, and the line that calls the model."""

import itertools
import sys
import traceback

from torch import nn

from syncbn.call_stack import callers, line_of_program
from syncbn.texts import printable


def quoted(path: str) -> str:
    """The path, or `layer '1'` for one that would read as a number."""
    return f"layer '{path}'" if path.replace(".", "").isdecimal() else path


def may_be_one_layer(paths: list[str]) -> bool:
    """Whether one layer may have these paths: a rank may have wrapped the model in another module, or have no model."""
    longest = max(paths, key=len)
    return all(not path or f".{longest}".endswith(f".{path}") for path in paths)


def path_in_model(layer: nn.Module) -> str:
    """The dotted name of a layer in the outermost module that is `self` in a frame of this call; empty without one.

    DistributedDataParallel and the wrapper of torch.compile are left out of the name.
    """
    inner, path = layer, ""
    for _, outer in callers():
        if isinstance(outer, nn.parallel.DistributedDataParallel):
            break
        if isinstance(outer, nn.Module) and outer is not inner:
            below = itertools.chain(outer.named_children(), outer.named_modules())  # most often it is a child
            name = next((name for name, module in below if module is inner), None)
            if name is not None:
                inner, path = outer, f"{name}.{path}"
    return printable(".".join(part for part in path.split(".") if part not in ("", "_orig_mod")))


def line_that_calls_model() -> str:
    """The line in which the program calls the outermost module that is `self` in a frame of this call: train.py:57."""
    frames = [frame for frame, caller in callers() if isinstance(caller, nn.Module)]
    return line_of_program(traceback.walk_stack(frames[-1] if frames else sys._getframe()))
