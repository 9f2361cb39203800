"""Train models of other libraries on W ranks, and on one process with the whole batch, and compare.

    scripts/libraries.sh                    installs the libraries, and trains all models
    scripts/libraries.sh monai timm         trains the models of these libraries

Prints the rows of the table in docs/works_with.md. A model matches if each loss, output, gradient, parameter and buffer
differs by at most 1e-8 of its largest value, in float64. The exit status is 1 if a model does not match. For Opacus the
script runs the code block of docs/works_with.md, and checks that Opacus then refuses converted layers.
"""

import argparse
import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import syncbn
from syncbn.testing import differences, local_layers

TOLERANCE = 1e-8  # Rounding alone can cause 1e-9, because the samples are added in another order.
SAMPLES = 5  # Two ranks have 3 and 2 samples.
IMAGES = (SAMPLES, 3, 64, 64)
Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]  # name, function that builds the model, shape of its input


def timm() -> Iterator[Case]:
    from timm import create_model

    names = """resnet18 regnety_002 repvgg_a0 mobilenetv3_small_050 mobilenetv4_conv_small_035 mnasnet_small lcnet_035
    tinynet_e efficientvit_b0 mobilevit_xxs swiftformer_xs starnet_s1 efficientnet_b0 dla46_c mobileone_s0"""
    for name in names.split():
        yield name, partial(create_model, name, num_classes=10), IMAGES


def segmentation_models_pytorch() -> Iterator[Case]:
    import segmentation_models_pytorch as smp

    encoder = "timm-mobilenetv3_small_minimal_100"
    for name in ("Unet", "UnetPlusPlus", "Linknet", "FPN", "PSPNet", "DeepLabV3Plus"):
        yield name, partial(getattr(smp, name), encoder, encoder_weights=None, classes=2), IMAGES


def monai() -> Iterator[Case]:
    from monai.networks import nets

    flat = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    deep = flat | {"spatial_dims": 3}
    image, volume = (SAMPLES, 1, 32, 32), (SAMPLES, 1, 16, 16, 16)
    few = {"channels": (4, 8, 16), "strides": (2, 2)}
    features = {"features": (4, 4, 8, 8, 16, 4), "norm": "batch"}
    sizes = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16)}
    blocks = {"init_filters": 4, "blocks_down": (1, 1, 1), "blocks_up": (1, 1), "norm": "batch"}
    growth = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2)}
    cases: list[Case] = [  # each also with MetaTensors
        ("UNet, 3d", partial(nets.UNet, **deep, **few, num_res_units=2, norm="batch"), volume),
        ("VNet", partial(nets.VNet, **flat), image),
        ("SegResNet, 3d", partial(nets.SegResNet, **deep, **blocks), volume),
        ("DenseNet, 3d", partial(nets.DenseNet, **deep, **growth), (SAMPLES, 1, 32, 32, 32)),
        ("resnet10, 3d", partial(nets.resnet10, n_input_channels=1, num_classes=2, widen_factor=0.25), volume),
    ]
    yield from cases
    yield "BasicUNetPlusPlus", partial(nets.BasicUNetPlusPlus, **flat, **features), image
    yield "AttentionUnet", partial(nets.AttentionUnet, **flat, **few), image
    yield "DynUNet, 3d", partial(nets.DynUNet, **deep, **sizes, norm_name="batch"), volume
    for name, build, shape in cases:
        yield f"{name}, MetaTensor", lambda build=build: MetaTensors(build()), shape


def ultralytics() -> Iterator[Case]:
    from ultralytics.nn import tasks

    detection, segmentation, classes = tasks.DetectionModel, tasks.SegmentationModel, tasks.ClassificationModel
    models = {"yolov5n": detection, "yolov8n": detection, "yolo11n": detection}
    for name, model in (models | {"yolo11n-seg": segmentation, "yolo11n-cls": classes}).items():
        yield name, partial(model, f"{name}.yaml", nc=2, verbose=False), IMAGES


def lightly() -> Iterator[Case]:
    from lightly.models import ResNetGenerator, modules

    for name in ("SimCLR", "BYOL", "SimSiam", "BarlowTwins", "SwaV", "NNCLR", "MMCR"):
        yield f"{name}ProjectionHead", partial(getattr(modules, f"{name}ProjectionHead"), 32, 16, 8), (9, 32)
    yield "ResNetGenerator", partial(ResNetGenerator, "resnet-18", width=0.25), (SAMPLES, 3, 32, 32)


def torch_geometric() -> Iterator[Case]:
    import torch_geometric.nn as pyg

    for name in ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN"):
        build = partial(getattr(pyg, name), 8, 16, 2, norm="batch_norm")
        yield name, lambda build=build: Rings(build()), (SAMPLES, 6, 8)  # graphs, nodes, features
    yield "MLP", partial(pyg.MLP, [8, 16, 16, 4]), (9, 8)


def transformers() -> Iterator[Case]:
    import transformers as hf

    small = {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}
    swift = {"image_size": 64, "depths": [1] * 4, "embed_dims": [8, 16, 16, 24]}
    series = {"num_input_channels": 2, "context_length": 32, "patch_length": 4, "patch_stride": 4, "d_model": 16}
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "ffn_dim": 16, "norm_type": "batchnorm"}
    segformer = {"depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16}
    yield "ResNetModel", partial(hf.ResNetModel, hf.ResNetConfig(**small)), IMAGES
    yield "RegNetModel", partial(hf.RegNetModel, hf.RegNetConfig(groups_width=8, **small)), IMAGES
    yield "MobileNetV1Model", partial(hf.MobileNetV1Model, hf.MobileNetV1Config(depth_multiplier=0.25)), IMAGES
    mobile_vit = hf.MobileViTConfig(hidden_sizes=[16, 24, 32], image_size=64)
    yield "MobileViTModel", partial(hf.MobileViTModel, mobile_vit), IMAGES
    yield "SwiftFormerModel", partial(hf.SwiftFormerModel, hf.SwiftFormerConfig(**swift)), IMAGES
    config = hf.SegformerConfig(drop_path_rate=0.0, **segformer)
    yield "SegformerForSemanticSegmentation", partial(hf.SegformerForSemanticSegmentation, config), IMAGES
    yield "PatchTSTModel", partial(hf.PatchTSTModel, hf.PatchTSTConfig(**series, **heads)), (SAMPLES, 32, 2)


class Rings(nn.Sequential):
    """A graph network on N graphs, (N, nodes, features), in each of which the nodes form a ring."""

    def forward(self, x: Tensor) -> Tensor:
        num_graphs, num_nodes, _ = x.shape
        node = torch.arange(num_graphs * num_nodes)
        following = node // num_nodes * num_nodes + (node + 1) % num_nodes
        edges = torch.stack((torch.cat((node, following)), torch.cat((following, node))))
        return self[0](x.flatten(0, 1), edges).unflatten(0, (num_graphs, num_nodes))


class MetaTensors(nn.Sequential):
    """A network whose input is the MetaTensor that MONAI's DataLoader makes of the samples."""

    def forward(self, x: Tensor) -> Tensor:
        from monai.data import DataLoader, MetaTensor

        samples = [MetaTensor(sample, meta={"index": index}) for index, sample in enumerate(x)]
        (batch,) = DataLoader(samples, batch_size=len(samples))
        output = self[0](batch)
        if not (isinstance(batch, MetaTensor) and isinstance(output, MetaTensor)):
            raise TypeError(f"expected MetaTensor, got a batch {type(batch)} and an output {type(output)}")
        return output.as_tensor()


FUNCTIONS = segmentation_models_pytorch, monai, ultralytics, lightly, torch_geometric, transformers, timm
LIBRARIES = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}  # name of pip -> cases


def loss_of(output: Any) -> Tensor:
    """Return a loss of all output tensors. (The plain mean would be constant after a batch norm.)"""
    if isinstance(output, Tensor):
        return F.softplus(output).mean()
    parts = output.values() if isinstance(output, Mapping) else output
    return sum(loss_of(part) for part in parts if part is not None)


def try_model(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[int, float]:
    """Convert and train a model on a batch of this shape. Return the number of synchronised layers, and the largest
    relative difference from one process."""
    torch.manual_seed(0)
    model, x = build().double().train(), torch.randn(shape, dtype=torch.float64)
    probe = copy.deepcopy(model)
    loss_of(probe(x)).backward()
    for parameter, copied in zip(model.parameters(), probe.parameters(), strict=True):
        if copied.grad is None:  # No output depends on the parameter. DDP would wait for its gradient.
            parameter.requires_grad_(False)
    syncbn.convert_syncbn_model(model)
    if local_layers(model):
        raise RuntimeError(f"not synchronised: {', '.join(local_layers(model))}")
    errors, trained = differences(model, (x,), loss_of)
    num_layers = sum(isinstance(module, syncbn.SyncBatchNorm) for module in trained.modules())
    return num_layers, max(error.relative for error in errors)


def try_opacus() -> None:
    """Raise RuntimeError unless Opacus refuses converted layers after the code block of docs/works_with.md."""
    from opacus.validators import ModuleValidator

    page = Path(__file__).parent.parent / "docs" / "works_with.md"
    (block,) = re.findall(r"^```python\n(from opacus.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    layers = syncbn.convert_syncbn_model(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(3), nn.SyncBatchNorm(3)))
    before = [ModuleValidator.is_valid(layer) for layer in layers]
    exec(block, {"model": layers, "nn": nn, "syncbn": syncbn})
    after = [ModuleValidator.is_valid(layer) for layer in layers]
    if not all(before) or any(after):
        raise RuntimeError(f"Opacus accepts the layers: {before} before the page's code block, {after} after it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*LIBRARIES, "opacus"]
    parser.add_argument("libraries", nargs="*", default=known, help=f"(default: {' '.join(known)})")
    warnings.simplefilter("ignore")  # The libraries warn. The script raises an error for layers that stay local.
    try:
        __import__("torchvision")
    except RuntimeError:  # A torchvision for GPUs with a torch for CPUs lacks two operators that it uses at import.
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    dist.init_process_group("gloo")
    failed = False
    for library in parser.parse_args().libraries:
        if library == "opacus":
            try_opacus()
            continue
        models, errors = [], {}
        for name, build, shape in LIBRARIES[library]():
            num_layers, errors[name] = try_model(build, shape)
            models.append(f"{name} ({num_layers})")
        worst = max(errors, key=errors.get)
        largest = errors[worst]
        if dist.get_rank() == 0:
            row = library, version(library), "; ".join(models), f"{largest:.1e}", str(date.today())
            print(f"| {' | '.join(row)} |", flush=True)
        if largest > TOLERANCE:
            print(f"DOES NOT MATCH: {worst}, {largest:.1e}", flush=True)
            failed = True
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
