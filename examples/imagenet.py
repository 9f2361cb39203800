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
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
        self.classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()) if folder.is_dir() else []
        if not self.classes:
            sys.exit(f"{folder} has no folders of classes; --data FOLDER needs train/CLASS/*.jpg and val/CLASS/*.jpg")
        self.files: list[tuple[str, int]] = []
        for label, name in enumerate(self.classes):
            paths = sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(SUFFIXES))
            if not paths:
                sys.exit(f"{folder / name} holds no image ({', '.join(SUFFIXES)}); put some there or remove the folder")
            self.files += [(path, label) for path in paths]
        self.image_size, self.seed, self.epoch, self.smallest = image_size, seed, 0, smallest

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, S, S) of uint8, and its label."""
        path, label = self.files[index]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
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


class Training:
    """Data, model, optimizer, and the results of each epoch."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        data, size = arguments.data, arguments.image_size
        self.images, validation = (
            Images(data / "train", size, arguments.seed, arguments.smallest_crop),
            Images(data / "val", size),
        )
        if some := ", ".join(sorted(set(self.images.classes) ^ set(validation.classes))[:5]):
            sys.exit(f"train and val in {data} must have the same classes; only one of them has {some}")
        self.batch = arguments.images_per_rank * world_size()
        if len(self.images) < self.batch:
            sys.exit(f"{data} has {len(self.images)} training images; lower --images-per-rank, or add some")
        self.sampler = DistributedSampler(self.images, world_size(), rank(), seed=arguments.seed, drop_last=True)
        options = {"batch_size": arguments.images_per_rank, "num_workers": arguments.workers}
        options["pin_memory"] = device.type == "cuda"
        self.loader = DataLoader(self.images, sampler=self.sampler, drop_last=True, **options)
        # A DistributedSampler would pad the shares to equal sizes with images that count twice.
        self.validation = DataLoader(Subset(validation, range(rank(), len(validation), world_size())), **options)

        torch.manual_seed(arguments.seed)
        torch.backends.cudnn.benchmark = True  # All batches have one size.
        # For an existing model, call syncbn.convert_syncbn_model(model).
        norm_layer = nn.BatchNorm2d if arguments.local_batch_norm else syncbn.SyncBatchNorm2d
        self.memory_format = torch.channels_last if arguments.channels_last else torch.contiguous_format
        self.module = ResNet(len(self.images.classes), arguments.blocks, arguments.width, norm_layer)
        self.module.to(device, memory_format=self.memory_format)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.amp)
        self.compiled = torch.compile(self.module) if arguments.compile else self.module
        self.model = parallel(self.compiled)
        decayed, others = (
            [p for p in self.module.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False)
        )
        groups = {"params": decayed, "weight_decay": arguments.weight_decay}, {"params": others}
        self.optimizer = torch.optim.SGD(groups, momentum=arguments.momentum)
        self.epochs: list[dict[str, float]] = []
        sizes = {"--blocks": arguments.blocks, "--width": arguments.width, "classes": len(self.images.classes)}
        self.settings = {name: str(value) for name, value in sizes.items()}  # A checkpoint must have the same.
        if arguments.checkpoint is not None and (state := resume(arguments.checkpoint, self.settings)) is not None:
            self.module.load_state_dict(state["model"])
            groups = self.optimizer.state_dict()["param_groups"]  # the options of this command line
            self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
            self.epochs = state["epochs"]

    def batches(self, loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images (N, 3, S, S) and labels (N,)."""
        mean, std = (torch.tensor(values, device=self.device).view(3, 1, 1) for values in (MEAN, STD))
        for images, labels in loader:
            images = images.to(self.device, non_blocking=True, memory_format=self.memory_format)
            yield (images / 255 - mean) / std, labels.to(self.device, non_blocking=True)

    def run(self) -> None:
        num_epochs, num_steps = self.arguments.epochs, len(self.loader)
        with progress_bar(len(self.epochs) * num_steps, num_epochs * num_steps) as advance:
            while len(self.epochs) < num_epochs:
                start = time.monotonic()
                loss = self.train(advance)
                speed = num_steps * self.batch / (time.monotonic() - start)
                if not math.isfinite(loss):
                    sys.exit(f"the loss of epoch {len(self.epochs) + 1} is {loss}; lower --learning-rate")
                top_1, top_5 = self.evaluate()
                self.epochs.append({"loss": loss, "top-1": top_1, "top-5": top_5, "images per second": speed})
                if rank() == 0:
                    accuracies = f"top-1 {top_1:.2%}, top-5 {top_5:.2%}"
                    print(f"epoch {len(self.epochs)}/{num_epochs}: loss {loss:.4f}, {accuracies}, {speed:.0f} images/s")
                    if self.arguments.checkpoint is not None:
                        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                        state |= {"settings": self.settings, "epochs": self.epochs}
                        launch.save(state, self.arguments.checkpoint)

    def train(self, advance: Callable[[str], None]) -> float:
        """Train for an epoch and return the mean loss over all ranks."""
        epoch, num_epochs, num_steps = len(self.epochs), self.arguments.epochs, len(self.loader)
        self.images.epoch = epoch  # The workers start again in each epoch, with a copy of the data set.
        self.sampler.set_epoch(epoch)
        self.model.train()
        peak = self.arguments.learning_rate * self.batch / 256
        losses, shown = torch.zeros(1, dtype=torch.float64, device=self.device), ""
        for step, (images, labels) in enumerate(self.batches(self.loader), start=epoch * num_steps):
            for group in self.optimizer.param_groups:
                group["lr"] = peak * schedule(step, self.arguments.warm_up * num_steps, num_epochs * num_steps)
            with self.autocast:
                loss = F.cross_entropy(self.model(images), labels, label_smoothing=self.arguments.label_smoothing)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses += loss.detach()
            if step % SHOWN_EVERY == 0:
                shown = f"loss {loss.item():.3f}"
            advance(f"epoch {epoch + 1}/{num_epochs}  {shown}")
        return sum_over_ranks(losses).item() / (num_steps * world_size())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return top-1 and top-5 over all validation images, each counted once."""
        if self.arguments.local_batch_norm:
            merge_running_stats(self.module)
        self.model.eval()
        counts = torch.zeros(3, dtype=torch.int64, device=self.device)  # right, right among five, images
        for images, labels in self.batches(self.validation):
            with self.autocast:
                logits = self.compiled(images)  # Without DDP, because ranks may have different numbers of batches.
            right = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)  # (N, 5)
            counts += torch.stack((right[:, 0].sum(), right.sum(), torch.tensor(len(labels), device=self.device)))
        top_1, top_5, num_images = sum_over_ranks(counts).tolist()
        return top_1 / num_images, top_5 / num_images


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    training = Training(arguments, device)
    training.run()
    if rank() == 0:
        layers = syncbn.summary(training.compiled)
        sent = sum(layer.forward_bytes + layer.backward_bytes for layer in layers) / 1e6
        states = ", ".join(sorted({layer.last_step for layer in layers})) or "-"
        print(f"{len(layers)} synchronised layers, {sent:.2f} MB a step from each rank; last step: {states}")
        launch.write(arguments, {"epochs": training.epochs})


if __name__ == "__main__":
    run_on_ranks(job, parser)
