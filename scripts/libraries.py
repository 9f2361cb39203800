"""Trains models of other libraries on W ranks and on one process with the whole batch, and compares.

    scripts/libraries.sh                    installs the libraries, tries all, and fills in docs/works_with.md
    scripts/libraries.sh monai timm         tries these, and writes nothing

Opacus trains no model: the lines of docs/works_with.md must make it refuse converted layers.

A loss, output, gradient, parameter or buffer may differ by 1e-9 of the largest of its kind, in float64, or by 100 times
what nn.BatchNorm on one process differs from itself when the samples come in another order. A model that differs by
more does not match, and the script ends with status 1. It also prints which models refuse a batch without samples, with
which a rank that has run out of data goes on.
"""

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn
from syncbn.testing import TOLERANCES, _train, differences, local_layers

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"
ROUNDING = 100  # times what the order of the samples changes
STEPS = 2
SAMPLES = 5  # on 2 ranks 3 and 2
IMAGES = (SAMPLES, 3, 64, 64)

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]  # name, builds the model, shape of its input


class Row(NamedTuple):
    library: str
    model: str
    layers: int  # synchronised
    error: float  # of W ranks, the largest
    rounding: float  # of one process, whose samples come in another order
    refusal: str  # of a batch without samples; empty for a model that takes it


def of_timm() -> Iterator[Case]:
    from timm import create_model

    names = """resnet18 regnety_002 repvgg_a0 mobilenetv3_small_050 mobilenetv4_conv_small_035 mnasnet_small lcnet_035
    tinynet_e efficientvit_b0 mobilevit_xxs swiftformer_xs starnet_s1 efficientnet_b0 dla46_c mobileone_s0"""
    for name in names.split():
        yield name, partial(create_model, name, num_classes=10), IMAGES


def of_segmentation_models() -> Iterator[Case]:
    import segmentation_models_pytorch as smp

    encoder = "timm-mobilenetv3_small_minimal_100"
    for name in ("Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "DeepLabV3Plus"):
        yield name, partial(getattr(smp, name), encoder, encoder_weights=None, classes=2), IMAGES


def of_monai() -> Iterator[Case]:
    from monai.networks import nets

    flat, deep = ({"spatial_dims": dims, "in_channels": 1, "out_channels": 2} for dims in (2, 3))
    image, volume = (SAMPLES, 1, 32, 32), (SAMPLES, 1, 16, 16, 16)
    few = {"channels": (4, 8, 16), "strides": (2, 2)}
    features = {"features": (4, 4, 8, 8, 16, 4), "norm": "batch"}
    sizes = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)}
    blocks = {"init_filters": 4, "blocks_down": (1, 1, 1), "blocks_up": (1, 1), "norm": "batch"}
    growth = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2)}
    on_meta_tensors: list[Case] = [
        ("UNet, 3d", partial(nets.UNet, **deep, **few, num_res_units=2, norm="batch"), volume),
        ("VNet", partial(nets.VNet, **flat), image),
        ("SegResNet, 3d", partial(nets.SegResNet, **deep, **blocks), volume),
        ("DenseNet, 3d", partial(nets.DenseNet, **deep, **growth), (SAMPLES, 1, 32, 32, 32)),
        ("resnet10, 3d", partial(nets.resnet10, n_input_channels=1, num_classes=2, widen_factor=0.25), volume),
    ]
    yield from on_meta_tensors
    yield "BasicUNetPlusPlus", partial(nets.BasicUNetPlusPlus, **flat, **features), image
    yield "AttentionUnet", partial(nets.AttentionUnet, **flat, **few), image
    yield "DynUNet, 3d", partial(nets.DynUNet, **deep, **sizes, norm_name="batch"), volume
    for name, build, shape in on_meta_tensors:
        yield f"{name}, MetaTensor", lambda build=build: OnMetaTensors(build()), shape


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
        yield name, lambda name=name: OnRings(getattr(pyg, name)(8, 16, 2, norm="batch_norm")), graphs
    yield "MLP", partial(pyg.MLP, [8, 16, 16, 4]), (9, 8)


def of_transformers() -> Iterator[Case]:
    import transformers as hf

    small = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
    swift = {"image_size": 64, "depths": [1] * 4, "embed_dims": [8, 16, 16, 24]}
    series = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 16}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 16, "norm_type": "batchnorm"}
    segformer = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16}
    for name, end, options, shape in (
        ("ResNet", "Model", small, IMAGES),
        ("RegNet", "Model", {"groups_width": 8, **small}, IMAGES),
        ("MobileNetV1", "Model", {"depth_multiplier": 0.25}, IMAGES),
        ("MobileViT", "Model", {"hidden_sizes": [16, 24, 32], "image_size": 64}, IMAGES),
        ("SwiftFormer", "Model", swift, IMAGES),
        ("Segformer", "ForSemanticSegmentation", {"drop_path_rate": 0.0, **segformer}, IMAGES),
        ("PatchTST", "Model", {**series, **heads}, (SAMPLES, 32, 2)),
    ):
        config = getattr(hf, f"{name}Config")(**options)
        yield f"{name}{end}", partial(getattr(hf, f"{name}{end}"), config), shape


class Wrapper(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


class OnRings(Wrapper):
    """A graph network on N rings of nodes: (N, nodes, features) -> (N, nodes, features)."""

    def forward(self, x: Tensor) -> Tensor:
        num_graphs, num_nodes, _ = x.shape
        node = torch.arange(num_graphs * num_nodes)
        following = node // num_nodes * num_nodes + (node + 1) % num_nodes
        edges = torch.stack((torch.cat((node, following)), torch.cat((following, node))))
        return self.network(x.flatten(0, 1), edges).unflatten(0, (num_graphs, num_nodes))


class OnMetaTensors(Wrapper):
    """A network on the MetaTensor that MONAI's DataLoader makes of the samples."""

    def forward(self, x: Tensor) -> Tensor:
        from monai.data import DataLoader, MetaTensor

        samples = [MetaTensor(sample, meta={"index": index}) for index, sample in enumerate(x)]
        (batch,) = DataLoader(samples, batch_size=len(samples))
        output = self.network(batch)
        if not (isinstance(batch, MetaTensor) and isinstance(output, MetaTensor)):
            raise TypeError(f"expected MetaTensor, got a batch {type(batch)} and an output {type(output)}")
        return output.as_tensor()


def loss_of(output: Any) -> Tensor:
    """Of all tensors of an output, the mean over samples of what is not constant behind a batch norm."""
    if isinstance(output, Tensor):
        return F.softplus(output).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    return torch.stack([loss_of(part) for part in parts if part is not None]).sum()


def try_model(library: str, name: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Row:
    """Convert and train it; the shape is that of the whole batch."""
    torch.manual_seed(0)
    model, x = build().double().train(), torch.randn(shape, dtype=torch.float64)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()
    first, second = gradients_after_training(model, x), gradients_after_training(model, x.flip(0))
    used = [pair for pair in zip(first, second, strict=True) if None not in pair]
    rounding = max(float((a - b).abs().max()) for a, b in used) / max(float(a.abs().max()) for a, _ in used)
    for parameter, gradient in zip(model.parameters(), first, strict=True):
        parameter.requires_grad_(gradient is not None)  # DistributedDataParallel waits for all others
    syncbn.convert_syncbn_model(model)
    if local := local_layers(model):
        raise RuntimeError(f"not synchronised: {', '.join(local)}")
    found, trained = differences(model, (x,), loss_of, STEPS)
    layers = sum(isinstance(module, syncbn.SyncBatchNorm) for module in trained.modules())
    return Row(library, name, layers, max(one.relative for one in found), rounding, refusal_of_empty_batch(model, x))


def refusal_of_empty_batch(model: nn.Module, x: Tensor) -> str:
    """The error of a training step of all ranks without samples."""
    try:
        loss_of(model(x[:0])).backward()
    except Exception as error:
        return str(error)
    return ""


def gradients_after_training(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Of the last step, with nn.BatchNorm on one process; the model stays as it is."""
    model = copy.deepcopy(model)
    _train(model, [x], loss_of, STEPS, share=1.0)
    return [parameter.grad for parameter in model.parameters()]


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {  # by the names that pip knows
    "segmentation-models-pytorch": of_segmentation_models,
    "monai": of_monai,
    "ultralytics": of_ultralytics,
    "lightly": of_lightly,
    "torch-geometric": of_torch_geometric,
    "transformers": of_transformers,
    "timm": of_timm,
}


def try_opacus() -> None:
    """**Raises** RuntimeError unless Opacus refuses converted layers behind the page's lines, and only there."""
    from opacus.validators import ModuleValidator

    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (lines,) = (block for block in blocks if "opacus" in block)
    model = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)))
    before = [ModuleValidator.is_valid(layer) for layer in model]
    exec(lines, {"model": model, "nn": nn, "syncbn": syncbn})
    behind = [ModuleValidator.is_valid(layer) for layer in model]
    if (before, behind) != ([True] * 3, [False] * 3):
        raise RuntimeError(f"Opacus finds the layers valid: {before} before the page's lines, {behind} behind them")


def write(rows: list[Row]) -> None:
    """Write the figures of the page: a line for each library, with the errors of its worst model. The words stay."""
    table = ""
    for library in dict.fromkeys(row.library for row in rows):
        its_rows = [row for row in rows if row.library == library]
        models = "; ".join(f"{row.model} ({row.layers})" for row in its_rows)
        worst = max(its_rows, key=lambda row: row.error)
        cells = library, version(library), models, f"{worst.error:.1e}", f"{worst.rounding:.1e}", date.today()
        table += f"| {' | '.join(map(str, cells))} |\n"
    text = re.sub(r"^\d+ models", f"{len(rows)} models", PAGE.read_text(), count=1, flags=re.MULTILINE)
    text = re.sub(r"torch \d[^,]*, CPU", f"torch {torch.__version__}, CPU", text, count=1)
    PAGE.write_text(re.sub(r"(?<=\|---\|\n)(\|.*\n)+", table, text, count=1))


def main() -> int:
    known = [*LIBRARIES, "opacus"]
    libraries = sys.argv[1:] or known
    if unknown := {*libraries} - {*known}:
        raise SystemExit(f"libraries are {', '.join(known)}, got {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")  # the libraries' own; what is not converted is an error here
    try:
        __import__("torchvision")
    except RuntimeError:  # a build that does not fit torch has no operators; two must have a name to import it
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    dist.init_process_group("gloo")
    is_first, all_match, rows = dist.get_rank() == 0, True, []
    for library in libraries:
        if library == "opacus":
            try_opacus()
            continue
        for case in LIBRARIES[library]():
            row = try_model(library, *case)
            rows.append(row)
            matches = row.error <= max(TOLERANCES[torch.float64], ROUNDING * row.rounding)
            all_match = all_match and matches
            if is_first:
                print("" if matches else "DOES NOT MATCH", *row, flush=True)
        if is_first:
            tried = [row.refusal for row in rows if row.library == library]
            print(f"{tried.count('')} of {len(tried)} models of {library} take a batch without samples", flush=True)
        if is_first and not sys.argv[1:]:
            write(rows)
    dist.destroy_process_group()
    return not all_match


if __name__ == "__main__":
    sys.exit(main())
