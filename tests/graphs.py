"""The graphs that torch.compile makes: CommDebugMode sees eager mode only."""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Graphs:
    """A back end of torch.compile that keeps the graphs of AOTAutograd, forward and backward, and runs them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.backend = aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)

    def keep(self, module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)
