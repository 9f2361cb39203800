"""Train ResNet-50 on ImageNet: DistributedDataParallel, mixed precision, channels last, compiled.

--data is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (or .jpeg, .png), of any classes. Every batch norm
normalises the whole batch; with --local-batch-norm, only this rank's images. The learning rate is 0.1 per 256 images.

    python examples/imagenet.py --data imagenet --images-per-rank 256        one process with the batch of 8 GPUs
    torchrun --standalone --nproc-per-node 8 examples/imagenet.py --data imagenet --amp --channels-last --compile
    torchrun --standalone --nproc-per-node 2 examples/imagenet.py --data few-images --image-size 32 --width 8 \\
        --blocks 1 1 1 1 --images-per-rank 16 --epochs 12 --warm-up 1 --learning-rate 2 --momentum 0.8 \\
        --smallest-crop 0.8 --workers 1        two CPUs, seconds

A step takes the same images with the same crops on any number of ranks, so W ranks train as one process, up to
rounding. With --checkpoint FILE, which only rank 0 reads and writes, the job saves the end of each epoch, and resumes
from the file if it exists. Prints loss, top-1, top-5 and speed of each epoch, and writes them to metrics.json in
--output. Needs Pillow.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import launch
import numpy as np
import torch
import torch.nn.functional as F
from launch import new_parser, parallel, positive, progress_bar, rank, resume, run_on_ranks, sum_over_ranks, world_size
from PIL import Image
from running_statistics import merge_running_stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import syncbn

SUFFIXES = ".jpg", ".jpeg", ".png"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's red, green and blue, in [0, 1]
CENTER = 224 / 256  # side of the validation crop, as a share of the shorter side
SHOWN_EVERY = 50  # steps; showing a loss waits for the GPU
Norm = Callable[[int], nn.Module]  # number of channels -> layer
Box = tuple[float, float, float, float]  # left, top, right, bottom

parser = new_parser(__doc__, "imagenet", timeout=600)
add = parser.add_argument
add("--data", type=Path, required=True, help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
add("--epochs", type=positive, default=90, help="passes over the training images")
add("--warm-up", type=float, default=5, help="epochs in which the learning rate rises")
add("--images-per-rank", type=positive, default=32, help="images per rank and step")
add("--learning-rate", type=float, default=0.1, help="per 256 images of the whole batch")
add("--momentum", type=float, default=0.9, help="of SGD")
add("--weight-decay", type=float, default=1e-4, help="of weights with more than one dim")
add("--label-smoothing", type=float, default=0.1, help="share spread over all classes")
add("--image-size", type=positive, default=224, help="pixels a side")
add("--smallest-crop", type=float, default=0.08, help="share of a training image's area")
add("--blocks", type=positive, nargs=4, default=[3, 4, 6, 3], help="per stage; 3 4 23 3 is ResNet-101")
add("--width", type=positive, default=64, help="channels of the first convolution")
add("--local-batch-norm", action="store_true", help="nn.BatchNorm2d: each rank normalises its images alone")
add("--amp", action="store_true", help="autocast to bfloat16")
add("--channels-last", action="store_true", help="memory format of images and weights")
add("--compile", action="store_true", help="torch.compile the model")
add("--workers", type=int, default=8, help="processes per rank that read images")
add("--seed", type=int, default=0, help="of weights, order and crops")
add("--checkpoint", type=Path, help="file to resume from, and to write")


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each with batch norm, + shortcut, relu."""

    def __init__(self, num_in: int, num_inside: int, stride: int, norm_layer: Norm) -> None:
        super().__init__()
        num_out = 4 * num_inside
        self.conv1, self.bn1 = nn.Conv2d(num_in, num_inside, 1, bias=False), norm_layer(num_inside)
        self.conv2, self.bn2 = nn.Conv2d(num_inside, num_inside, 3, stride, 1, bias=False), norm_layer(num_inside)
        self.conv3, self.bn3 = nn.Conv2d(num_inside, num_out, 1, bias=False), norm_layer(num_out)
        nn.init.zeros_(self.bn3.weight)  # At first each block is its shortcut.
        self.downsample = nn.Sequential()  # the identity
        if stride != 1 or num_in != num_out:
            self.downsample.extend((nn.Conv2d(num_in, num_out, 1, stride, bias=False), norm_layer(num_out)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)  # (N, num_inside, H, W)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)  # (N, num_inside, H / stride, W / stride)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)  # (N, 4 * num_inside, ...)


class ResNet(nn.Module):
    """He et al. 2015, https://arxiv.org/abs/1512.03385, with the strides and the state_dict of torchvision's."""

    def __init__(
        self,
        classes: int = 1000,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        norm_layer: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), norm_layer(width)
        num_in = width
        for stage, num_blocks in enumerate(blocks):
            layer = nn.Sequential()
            for index in range(num_blocks):
                layer.append(Bottleneck(num_in, width * 2**stage, 2 if stage and not index else 1, norm_layer))
                num_in = 4 * width * 2**stage
            self.add_module(f"layer{stage + 1}", layer)
        self.fc = nn.Linear(num_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) images -> (N, classes) logits."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, padding=1)  # (N, width, S / 4, S / 4)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (N, 32 * width, S / 32, S / 32)
        return self.fc(x.mean((2, 3)))


class Images(Dataset[tuple[Tensor, int]]):
    """The images of a folder with a folder per class, all of one size: random crops, or the centers if `smallest` is
    None. The crops depend only on seed, epoch and index, so they are the same on any number of ranks and workers."""

    def __init__(self, folder: Path, image_size: int, seed: int = 0, smallest: float | None = None) -> None:
        paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
        if not paths:
            sys.exit(f"{folder} has no images; --data FOLDER needs train/CLASS/*.jpg and val/CLASS/*.jpg")
        self.classes = sorted({path.parent.name for path in paths})
        labels = {name: label for label, name in enumerate(self.classes)}
        self.files = [(path, labels[path.parent.name]) for path in paths]
        self.image_size, self.seed, self.epoch, self.smallest = image_size, seed, 0, smallest

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, S, S) of uint8, and its label."""
        path, label = self.files[index]
        try:
            image = Image.open(path).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise RuntimeError(f"cannot read the image {path}; replace or remove it ({error})") from error
        generator = random.Random(f"{self.seed} {self.epoch} {index}")
        box = center(*image.size) if self.smallest is None else random_crop(*image.size, self.smallest, generator)
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box=box)
        if self.smallest is not None and generator.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def center(width: int, height: int) -> Box:
    side = CENTER * min(width, height)
    return (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2


def random_crop(width: int, height: int, smallest: float, generator: random.Random) -> Box:
    """Return a box with at least the share `smallest` of the area and sides of 3 : 4 to 4 : 3, or the center if ten
    draws do not fit."""
    for _ in range(10):
        area = width * height * generator.uniform(smallest, 1)
        ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = generator.uniform(0, width - w), generator.uniform(0, height - h)
            return left, top, min(left + w, width), min(top + h, height)
    return center(width, height)


def schedule(step: int, num_warm_up: float, num_steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then half a cosine that falls to 0."""
    if step < num_warm_up:
        return (step + 1) / (num_warm_up + 1)
    return (1 + math.cos(math.pi * (step - num_warm_up) / (num_steps - num_warm_up))) / 2


def make_loaders(arguments: argparse.Namespace, device: torch.device) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of this rank's training and validation images."""
    data, size = arguments.data, arguments.image_size
    training = Images(data / "train", size, arguments.seed, arguments.smallest_crop)
    validation = Images(data / "val", size)
    if some := ", ".join(sorted(set(training.classes) ^ set(validation.classes))[:5]):
        sys.exit(f"train and val in {data} must have the same classes; only one of them has {some}")
    if len(training) < arguments.images_per_rank * world_size():
        sys.exit(f"{data} has {len(training)} training images; lower --images-per-rank, or add some")
    sampler = DistributedSampler(training, world_size(), rank(), seed=arguments.seed, drop_last=True)
    # A DistributedSampler would pad the shares to equal sizes with images that count twice.
    share = Subset(validation, range(rank(), len(validation), world_size()))
    options = {"batch_size": arguments.images_per_rank, "num_workers": arguments.workers}
    options["pin_memory"] = device.type == "cuda"
    return DataLoader(training, sampler=sampler, drop_last=True, **options), DataLoader(share, **options)


def batches(loader: DataLoader[Any], device: torch.device, channels_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield normalised images (N, 3, S, S) and labels (N,)."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=memory_format)
        yield (images / 255 - mean) / std, labels.to(device, non_blocking=True)


@torch.no_grad()
def evaluate(model: nn.Module, validation: Iterable[tuple[Tensor, Tensor]], autocast: torch.autocast) -> list[float]:
    """Return top-1 and top-5 over all validation images, each counted once. Call it without DDP, because ranks may have
    different numbers of batches."""
    counts = torch.zeros(3, dtype=torch.int64, device=next(model.parameters()).device)  # top-1, top-5, images
    for images, labels in validation:
        with autocast:
            logits = model.eval()(images)
        right = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)  # (N, 5)
        counts += torch.stack((right[:, 0].sum(), right.sum(), torch.tensor(len(labels), device=counts.device)))
    *right, num_images = sum_over_ranks(counts).tolist()
    return [number / num_images for number in right]


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    loader, validation = make_loaders(arguments, device)
    batch, classes = arguments.images_per_rank * world_size(), loader.dataset.classes
    torch.manual_seed(arguments.seed)
    torch.backends.cudnn.benchmark = True  # All batches have one size.
    # For an existing model, call syncbn.convert_syncbn_model(model).
    norm_layer = nn.BatchNorm2d if arguments.local_batch_norm else syncbn.SyncBatchNorm2d
    module = ResNet(len(classes), arguments.blocks, arguments.width, norm_layer).to(device)
    if arguments.channels_last:
        module.to(memory_format=torch.channels_last)
    compiled = torch.compile(module) if arguments.compile else module
    model = parallel(compiled)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.amp)
    decayed, others = ([p for p in module.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = {"params": decayed, "weight_decay": arguments.weight_decay}, {"params": others}
    optimizer = torch.optim.SGD(groups, momentum=arguments.momentum)

    sizes = {"--blocks": arguments.blocks, "--width": arguments.width, "classes": len(classes)}
    settings = {name: str(value) for name, value in sizes.items()}  # A checkpoint must have the same settings.
    epochs: list[dict[str, float]] = []  # results
    if arguments.checkpoint is not None and (state := resume(arguments.checkpoint, settings)) is not None:
        module.load_state_dict(state["model"])
        groups = optimizer.state_dict()["param_groups"]  # the options of this command line
        optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        epochs = state["epochs"]

    num_epochs, num_steps = arguments.epochs, len(loader)
    with progress_bar(len(epochs) * num_steps, num_epochs * num_steps) as advance:
        for epoch in range(len(epochs), num_epochs):
            start, shown = time.monotonic(), ""
            loader.dataset.epoch = epoch  # The workers start again in each epoch, with a copy of the data set.
            loader.sampler.set_epoch(epoch)
            model.train()
            losses = torch.zeros(1, dtype=torch.float64, device=device)
            images_and_labels = batches(loader, device, arguments.channels_last)
            for step, (images, labels) in enumerate(images_and_labels, start=epoch * num_steps):
                factor = schedule(step, arguments.warm_up * num_steps, num_epochs * num_steps)
                for group in optimizer.param_groups:
                    group["lr"] = arguments.learning_rate * batch / 256 * factor
                with autocast:
                    loss = F.cross_entropy(model(images), labels, label_smoothing=arguments.label_smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += loss.detach()
                if step % SHOWN_EVERY == 0:
                    shown = f"loss {loss.item():.3f}"
                advance(f"epoch {epoch + 1}/{num_epochs}  {shown}")
            mean_loss = sum_over_ranks(losses).item() / (num_steps * world_size())
            speed = num_steps * batch / (time.monotonic() - start)
            if not math.isfinite(mean_loss):
                sys.exit(f"the loss of epoch {epoch + 1} is {mean_loss}; lower --learning-rate")
            if arguments.local_batch_norm:
                merge_running_stats(module)
            top_1, top_5 = evaluate(compiled, batches(validation, device, arguments.channels_last), autocast)
            epochs.append({"loss": mean_loss, "top-1": top_1, "top-5": top_5, "images per second": speed})
            if rank() == 0:
                accuracies = f"top-1 {top_1:.2%}, top-5 {top_5:.2%}"
                print(f"epoch {epoch + 1}/{num_epochs}: loss {mean_loss:.4f}, {accuracies}, {speed:.0f} images/s")
                if arguments.checkpoint is not None:
                    state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
                    launch.save({"settings": settings, **state, "epochs": epochs}, arguments.checkpoint)

    if rank() == 0:
        layers = syncbn.summary(compiled)
        sent = sum(layer.forward_bytes + layer.backward_bytes for layer in layers) / 1e6
        states = ", ".join(sorted({layer.last_step for layer in layers})) or "-"
        print(f"{len(layers)} synchronised layers, {sent:.2f} MB a step from each rank; last step: {states}")
        launch.write(arguments, {"epochs": epochs})


if __name__ == "__main__":
    run_on_ranks(job, parser)
