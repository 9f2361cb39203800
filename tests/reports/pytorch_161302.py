"""torch.compile breaks the graph at nn.SyncBatchNorm (https://github.com/pytorch/pytorch/issues/161302).

torchrun --standalone --nproc-per-node 2 tests/reports/pytorch_161302.py
"""

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

import syncbn


def main() -> None:
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 3, 6, 6)
    try:
        theirs = f"compiles to {torch._dynamo.explain(nn.SyncBatchNorm(3))(x).graph_count} graphs"
    except ValueError as error:
        theirs = f"its graph cannot be had on a CPU, ValueError: {error}"

    model = nn.Sequential(nn.Conv2d(3, 4, 3), syncbn.SyncBatchNorm2d(4), nn.ReLU())
    (graph,) = torch._dynamo.explain(model)(x).graphs
    assert all(word in graph.code for word in ("conv2d", "autograd_function_apply", "relu"))
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))
    if dist.get_rank() == 0:
        print("torch:", theirs)
        print("syncbn: settled. Convolution, layer and ReLU are one graph, with the outputs of the uncompiled model")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
