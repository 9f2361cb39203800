"""Trains models of other libraries on W ranks and on one process with the whole batch, and writes what it finds.

    scripts/libraries.sh                    installs the libraries, tries all, and writes docs/works_with.md
    scripts/libraries.sh monai timm         tries these, and writes nothing

A model does not match where a loss, output, gradient, parameter or buffer differs by more than 1e-9 of the largest of
its kind, in float64, and by more than 100 times what nn.BatchNorm on one process differs from itself when the samples
come in another order. Then the script ends with status 1.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn
from syncbn.testing import LEARNING_RATE, TOLERANCES, differences, local_layers

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"
ROUNDING = 100  # times what the order of the samples changes
STEPS = 2
SAMPLES = 5  # on 2 ranks 3 and 2
IMAGES = (SAMPLES, 3, 64, 64)

TIMM_MODELS = """
resnet18 regnety_002 repvgg_a0 mobilenetv3_small_050 mobilenetv4_conv_small_035 mnasnet_small lcnet_035 tinynet_e
efficientvit_b0 mobilevit_xxs swiftformer_xs starnet_s1 efficientnet_b0 dla46_c mobileone_s0
"""

IGNITE = "pytorch-ignite"

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]  # name, builds the model, shape of its input


class Row(NamedTuple):
    library: str
    model: str
    layers: int  # synchronised
    error: float  # of W ranks, the largest
    rounding: float  # of one process, whose samples come in another order

    @property
    def matches(self) -> bool:
        return self.error <= max(TOLERANCES[torch.float64], ROUNDING * self.rounding)


def of_timm() -> Iterator[Case]:
    import timm

    for name in TIMM_MODELS.split():
        yield name, partial(timm.create_model, name, num_classes=10), IMAGES


def of_segmentation_models() -> Iterator[Case]:
    import segmentation_models_pytorch as smp

    encoder = "timm-mobilenetv3_small_minimal_100"
    for name in ("Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "DeepLabV3Plus"):
        yield name, partial(getattr(smp, name), encoder, encoder_weights=None, classes=2), IMAGES


def of_monai() -> Iterator[Case]:
    from monai.networks import nets

    flat = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    deep = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    image, volume = (SAMPLES, 1, 32, 32), (SAMPLES, 1, 16, 16, 16)
    few = {"channels": (4, 8, 16), "strides": (2, 2)}
    features = (4, 4, 8, 8, 16, 4)
    yield "UNet, 3d", partial(nets.UNet, **deep, **few, num_res_units=2, norm="batch"), volume
    yield "BasicUNetPlusPlus", partial(nets.BasicUNetPlusPlus, **flat, features=features, norm="batch"), image
    yield "AttentionUnet", partial(nets.AttentionUnet, **flat, **few), image
    yield "VNet", partial(nets.VNet, **flat), image
    sizes = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)}
    yield "DynUNet, 3d", partial(nets.DynUNet, **deep, **sizes, norm_name="batch"), volume
    blocks = {"init_filters": 4, "blocks_down": (1, 1, 1), "blocks_up": (1, 1)}
    yield "SegResNet, 3d", partial(nets.SegResNet, **deep, **blocks, norm="batch"), volume
    growth = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2)}
    yield "DenseNet, 3d", partial(nets.DenseNet, **deep, **growth), (SAMPLES, 1, 32, 32, 32)
    yield "resnet10, 3d", partial(nets.resnet10, n_input_channels=1, num_classes=2, widen_factor=0.25), volume


def of_ultralytics() -> Iterator[Case]:
    from ultralytics.nn import tasks

    for name in ("yolov5n", "yolov8n", "yolo11n"):
        yield name, partial(tasks.DetectionModel, f"{name}.yaml", nc=2, verbose=False), IMAGES
    yield "yolo11n-seg", partial(tasks.SegmentationModel, "yolo11n-seg.yaml", nc=2, verbose=False), IMAGES
    yield "yolo11n-cls", partial(tasks.ClassificationModel, "yolo11n-cls.yaml", nc=2, verbose=False), IMAGES


def of_lightly() -> Iterator[Case]:
    from lightly.models import ResNetGenerator, modules

    for name in ("SimCLR", "BYOL", "SimSiam", "BarlowTwins", "SwaV", "NNCLR", "MMCR"):
        yield f"{name}ProjectionHead", partial(getattr(modules, f"{name}ProjectionHead"), 32, 16, 8), (9, 32)
    yield "ResNetGenerator", partial(ResNetGenerator, "resnet-18", width=0.25), (SAMPLES, 3, 32, 32)


def of_torch_geometric() -> Iterator[Case]:
    import torch_geometric.nn as pyg

    graphs = (SAMPLES, 6, 8)  # with 6 nodes of 8 features each
    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
        yield name, partial(_on_rings, partial(getattr(pyg, name), 8, 16, 2, norm="batch_norm")), graphs
    yield "MLP", partial(pyg.MLP, [8, 16, 16, 4]), (9, 8)


def of_transformers() -> Iterator[Case]:
    import transformers as hf

    images = {"hidden_sizes": [8, 16], "depths": [1, 1]}
    series = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 16}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 16, "norm_type": "batchnorm"}
    segformer = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16}
    for name, config, shape in (
        ("ResNet", hf.ResNetConfig(embedding_size=8, **images), IMAGES),
        ("RegNet", hf.RegNetConfig(embedding_size=8, groups_width=8, **images), IMAGES),
        ("MobileNetV1", hf.MobileNetV1Config(depth_multiplier=0.25), IMAGES),
        ("MobileViT", hf.MobileViTConfig(hidden_sizes=[16, 24, 32], image_size=64), IMAGES),
        ("SwiftFormer", hf.SwiftFormerConfig(image_size=64, depths=[1] * 4, embed_dims=[8, 16, 16, 24]), IMAGES),
        ("Segformer", hf.SegformerConfig(drop_path_rate=0.0, **segformer), IMAGES),
        ("PatchTST", hf.PatchTSTConfig(**series, **heads), (SAMPLES, 32, 2)),
    ):
        end = "ForSemanticSegmentation" if name == "Segformer" else "Model"
        yield f"{name}{end}", partial(getattr(hf, f"{name}{end}"), config), shape


LIBRARIES: dict[str, Callable[[], Iterable[Case]]] = {  # by the names that pip knows
    "segmentation-models-pytorch": of_segmentation_models,
    "monai": of_monai,
    "ultralytics": of_ultralytics,
    "lightly": of_lightly,
    "torch-geometric": of_torch_geometric,
    "transformers": of_transformers,
    "timm": of_timm,
}


class _OnRings(nn.Module):
    """A graph network on N rings of nodes: (N, nodes, features) -> (N, nodes, features)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        num_graphs, num_nodes, _ = x.shape
        node = torch.arange(num_graphs * num_nodes)
        following = node // num_nodes * num_nodes + (node + 1) % num_nodes
        edges = torch.stack((torch.cat((node, following)), torch.cat((following, node))))
        y: Tensor = self.network(x.flatten(0, 1), edges)
        return y.unflatten(0, (num_graphs, num_nodes))


def _on_rings(network_fn: Callable[[], nn.Module]) -> nn.Module:
    return _OnRings(network_fn())


def loss_of(output: Any) -> Tensor:
    """Of all tensors of an output, the mean over samples of what is not constant behind a batch norm."""
    if isinstance(output, Tensor):
        return F.softplus(output).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    return torch.stack([loss_of(part) for part in parts if part is not None]).sum()


def tried(library: str, name: str, model: nn.Module, x: Tensor) -> Row:
    model = model.double().train()
    first, second = _gradients_after_training(model, x), _gradients_after_training(model, x.flip(0))
    largest = max(float(one.abs().max()) for one in first if one is not None)
    apart = [float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        parameter.requires_grad_(gradient is not None)  # DistributedDataParallel waits for all others
    syncbn.convert_syncbn_model(model)
    if local := local_layers(model):
        raise RuntimeError(f"not synchronised: {', '.join(local)}")
    found, trained = differences(model, (x,), loss_of, STEPS)
    layers = sum(isinstance(module, syncbn.SyncBatchNorm) for module in trained.modules())
    return Row(library, name, layers, max(one.relative for one in found), max(apart) / largest)


def tried_by_ignite() -> Row:
    """Its trainer with a model that its auto_model has wrapped, against the same trainer on one process."""
    from ignite import distributed
    from ignite.engine import create_supervised_trainer

    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    x, labels = torch.randn(4 * size, 3, 8, 8, dtype=torch.float64), torch.randint(5, (4 * size,))
    reference = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    ).double()
    model = syncbn.convert_syncbn_model(copy.deepcopy(reference))
    reordered = copy.deepcopy(reference)
    part = slice(4 * rank, 4 * rank + 4)
    for network, inputs, wanted in (
        (distributed.auto_model(model), x[part], labels[part]),
        (reference, x, labels),
        (reordered, x.flip(0), labels.flip(0)),
    ):
        optimizer = torch.optim.SGD(network.parameters(), 0.01)
        create_supervised_trainer(network, optimizer, F.cross_entropy).run([(inputs, wanted)], max_epochs=3)
    return Row(IGNITE, "create_supervised_trainer", 1, _apart(model, reference), _apart(reordered, reference))


def _apart(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _gradients_after_training(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Of the last step, with nn.BatchNorm on one process; the model stays as it is."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model(x.clone())).backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters()]


def rows_of(library: str) -> Iterator[Row]:
    if library == IGNITE:
        yield tried_by_ignite()
        return
    for name, build, shape in LIBRARIES[library]():
        torch.manual_seed(0)
        yield tried(library, name, build(), torch.randn(shape, dtype=torch.float64))


def make_torchvision_importable() -> None:
    """Where its build does not fit torch's, as one for CUDA beside a torch for CPUs, it loads none of its operators and
    cannot be imported unless two of them have a name. No model here calls them."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)


def page(rows: list[Row]) -> str:
    lines = [
        f"| {row.library} | {version(row.library)} | {row.model} | {row.layers} "
        f"| {row.error:.1e} | {row.rounding:.1e} | {date.today()} |"
        for row in rows
    ]
    return TEXT.format(count=len(rows), steps=STEPS, torch=torch.__version__, rows="\n".join(lines))


TEXT = """\
# Works with

{count} models of other libraries, converted by `syncbn.convert_syncbn_model(model)` and nothing else, train on 2 ranks
as on one process that has the whole batch. `scripts/libraries.sh` writes this page: torch {torch}, CPU and gloo,
float64, random weights, {steps} steps of SGD under DistributedDataParallel, slices of unequal size.

- *layers*: the synchronised ones; no batch norm of the model is left alone.
- *largest error*: of all outputs, losses, gradients, parameters and buffers, relative to the largest of their kind.
- *order alone*: by how much the last gradients of nn.BatchNorm on one process change when the samples come in reverse
  order. Nothing but rounding differs there: a network that amplifies it shows it in both columns.

A model matches up to 1e-9, or up to 100 times the order alone; where one does not, the script fails. ignite's row is
its trainer with its `auto_model`: parameters and buffers after 3 steps, slices of equal size.

| library | version | model | layers | largest error | order alone | date |
|---|---|---|---|---|---|---|
{rows}

The loss is a mean over samples of the model's outputs. One that reduces over the batch in another way, such as a
detector's division by the number of its positive anchors, or a contrastive loss, differs between ranks and one process
whatever batch norm does. Dropout is off, and parameters that no output depends on are frozen, as
DistributedDataParallel wants.

Tried and left out, as nothing can be compared (2026-11-23):

- timm's `ghostnet_100` amplifies rounding until nothing is left: with nn.BatchNorm on one process, the order of the
  samples changes its gradients by as much as they are.
- transformers' `Wav2Vec2ConformerModel` differs from itself by 4e-5, with nn.BatchNorm and its dropout modules off.
- lightly's `DINOProjectionHead` cannot be deep-copied, which the comparison needs; its heads for MoCo and DenseCL have
  no batch norm.
- torchvision's operators, which no model above calls: a build that does not fit torch's loads none of them.
"""


def main() -> int:
    libraries = sys.argv[1:] or [IGNITE, *LIBRARIES]
    if unknown := set(libraries) - {IGNITE, *LIBRARIES}:
        raise SystemExit(f"libraries are {IGNITE}, {', '.join(LIBRARIES)}, got {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")  # the libraries' own; what is not converted is an error here
    make_torchvision_importable()
    dist.init_process_group("gloo")
    rows = []
    for library in libraries:
        for row in rows_of(library):
            rows.append(row)
            if dist.get_rank() == 0:
                print("" if row.matches else "DOES NOT MATCH", *row, flush=True)
        if dist.get_rank() == 0 and not sys.argv[1:]:
            PAGE.write_text(page(rows))
    dist.destroy_process_group()
    return not all(row.matches for row in rows)


if __name__ == "__main__":
    sys.exit(main())
