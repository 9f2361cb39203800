"""Train ResNet-50 on ImageNet: DistributedDataParallel, mixed precision, channels last, compiled.

--data is a folder with train/CLASS/*.jpg and val/CLASS/*.jpg (or .jpeg, .png), of any classes. Batch norm normalises
the whole batch of all ranks.

    python examples/imagenet.py --data imagenet --images-per-rank 256        one GPU with the batch of the next command
    torchrun --standalone --nproc-per-node 8 examples/imagenet.py --data imagenet --amp --channels-last --compile
    torchrun --standalone --nproc-per-node 2 examples/imagenet.py --data few-images --image-size 32 --width 8 \\
        --blocks 1 1 1 1 --images-per-rank 16 --epochs 12 --warm-up 1 --learning-rate 2 --momentum 0.8 \\
        --smallest-crop 0.8 --workers 1        two CPUs, seconds

Images and crops of a step do not depend on the number of ranks, so W ranks train as one process, up to rounding. With
--checkpoint FILE the job saves its state after each epoch, and resumes if the file exists. Prints loss, top-1, top-5
and speed of each epoch, and writes them to metrics.json in --output. Needs Pillow.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import new_parser, progress, run_on_ranks
from PIL import Image
from results import write
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from train import load, parallel, save

import syncbn

SUFFIXES = ".jpg", ".jpeg", ".png"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's red, green and blue in [0, 1]
CENTER = 224 / 256  # side of the crop for validation, as a share of the shorter side of the image
STEPS_PER_LOSS = 50  # The progress shows a new loss after 50 steps, because reading a loss waits for the GPU.
Batch = tuple[Tensor, Tensor]  # images, labels

parser = new_parser(__doc__, "imagenet")
add = parser.add_argument
add("--data", type=Path, required=True, help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg")
add("--epochs", type=int, default=90, help="passes over the training images")
add("--warm-up", type=float, default=5, help="epochs in which the learning rate rises")
add("--images-per-rank", type=int, default=32, help="images per rank and step")
add("--learning-rate", type=float, default=0.1, help="per 256 images of the whole batch")
add("--momentum", type=float, default=0.9, help="of SGD")
add("--weight-decay", type=float, default=1e-4, help="of weights with more than one dim")
add("--label-smoothing", type=float, default=0.1, help="share spread over all classes")
add("--image-size", type=int, default=224, help="pixels a side")
add("--smallest-crop", type=float, default=0.08, help="share of a training image's area")
add("--blocks", type=int, nargs=4, default=[3, 4, 6, 3], help="per stage; 3 4 23 3 is ResNet-101")
add("--width", type=int, default=64, help="channels of the first convolution")
add("--amp", action="store_true", help="autocast to bfloat16")
add("--channels-last", action="store_true", help="memory format of images and weights")
add("--compile", action="store_true", help="torch.compile the model")
add("--workers", type=int, default=8, help="processes per rank that read images")
add("--seed", type=int, default=0, help="of weights, order and crops")
add("--checkpoint", type=Path, help="file to resume from, and to write")


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, each with batch norm, then the sum with the shortcut, and relu."""

    def __init__(self, num_in: int, num_inside: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * num_inside
        self.conv1, self.bn1 = nn.Conv2d(num_in, num_inside, 1, bias=False), nn.BatchNorm2d(num_inside)
        self.conv2, self.bn2 = nn.Conv2d(num_inside, num_inside, 3, stride, 1, bias=False), nn.BatchNorm2d(num_inside)
        self.conv3, self.bn3 = nn.Conv2d(num_inside, num_out, 1, bias=False), nn.BatchNorm2d(num_out)
        nn.init.zeros_(self.bn3.weight)  # Before training each block returns relu(shortcut).
        self.downsample = nn.Sequential()  # An empty Sequential returns its input.
        if stride != 1 or num_in != num_out:
            self.downsample.extend((nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)  # (N, num_inside, H, W)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)  # (N, num_inside, H / stride, W / stride)
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x), inplace=True)  # (N, 4 * num_inside, ...)


class ResNet(nn.Module):
    """He et al. 2015 (https://arxiv.org/abs/1512.03385), with the strides and the state_dict of torchvision's."""

    def __init__(self, classes: int = 1000, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width)
        num_in = width
        for stage, num_blocks in enumerate(blocks):
            layer = nn.Sequential()
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                layer.append(Bottleneck(num_in, width * 2**stage, stride))
                num_in = 4 * width * 2**stage
            self.add_module(f"layer{stage + 1}", layer)
        self.fc = nn.Linear(num_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, S, S) to logits (N, classes)."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x)), inplace=True), 3, 2, padding=1)  # (N, width, S / 4, S / 4)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (N, 32 * width, S / 32, S / 32)
        return self.fc(x.mean((2, 3)))


def random_crop(width: int, height: int, smallest: float, generator: random.Random) -> tuple[float, ...]:
    """Return left, top, right and bottom of a random box. A share of the area from `smallest` to 1 and a ratio of the
    sides from 3 / 4 to 4 / 3 are drawn. If a side of the box is longer than the image, the side is cut."""
    area = width * height * generator.uniform(smallest, 1)
    ratio = math.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3)))
    box_width, box_height = min(math.sqrt(area * ratio), width), min(math.sqrt(area / ratio), height)
    left, top = generator.uniform(0, width - box_width), generator.uniform(0, height - box_height)
    return left, top, min(left + box_width, width), min(top + box_height, height)  # min, because of rounding


class Images(Dataset[Batch]):
    """The images of a folder that has a folder for each class, resized to one size.

    For training, `smallest` is the smallest share of the area that `random_crop` draws. For validation, `smallest` is
    None, and crops are central. Crops depend only on seed, epoch and index, not on the numbers of ranks and workers.
    """

    def __init__(self, folder: Path, image_size: int, seed: int = 0, smallest: float | None = None) -> None:
        self.paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
        if not self.paths:
            sys.exit(f"{folder} has no images; --data FOLDER needs train/CLASS/*.jpg and val/CLASS/*.jpg")
        self.classes = sorted({path.parent.name for path in self.paths})
        self.image_size, self.seed, self.epoch, self.smallest = image_size, seed, 0, smallest

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (3, S, S) of uint8, and its label."""
        path = self.paths[index]
        try:
            image = Image.open(path).convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:
            raise RuntimeError(f"cannot read the image {path}; replace or remove it ({error})") from error
        generator, is_flipped = random.Random(f"{self.seed} {self.epoch} {index}"), False
        if self.smallest is None:
            side, (width, height) = CENTER * min(image.size), image.size
            box = (width - side) / 2, (height - side) / 2, (width + side) / 2, (height + side) / 2
        else:
            box = random_crop(*image.size, self.smallest, generator)
            is_flipped = generator.random() < 0.5
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, box=box)
        if is_flipped:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.classes.index(path.parent.name)


def make_loaders(arguments: argparse.Namespace, device: torch.device) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Return the loaders of this rank's training and validation images."""
    data, size = arguments.data, arguments.image_size
    training = Images(data / "train", size, arguments.seed, arguments.smallest_crop)
    validation = Images(data / "val", size)
    if training.classes != validation.classes:
        names = ", ".join(sorted({*training.classes} ^ {*validation.classes})[:5])
        sys.exit(f"train and val in {data} must have the same classes; only one of them has {names}")
    if len(training) < arguments.images_per_rank * dist.get_world_size():
        sys.exit(f"{data} has {len(training)} training images; lower --images-per-rank, or add some")
    sampler = DistributedSampler(training, seed=arguments.seed, drop_last=True)
    # Every validation image is on one rank. (A DistributedSampler would repeat images on ranks that have fewer.)
    local_validation = Subset(validation, range(dist.get_rank(), len(validation), dist.get_world_size()))
    options = {"batch_size": arguments.images_per_rank, "num_workers": arguments.workers}
    options["pin_memory"] = device.type == "cuda"
    return DataLoader(training, sampler=sampler, drop_last=True, **options), DataLoader(local_validation, **options)


def normalised_batches(loader: DataLoader[Batch], device: torch.device, channels_last: bool) -> Iterator[Batch]:
    """Yield normalised images (N, 3, S, S) and labels (N,) on the device."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    mean, std = torch.tensor(MEAN, device=device).view(3, 1, 1), torch.tensor(STD, device=device).view(3, 1, 1)
    for images, labels in loader:
        images = images.to(device, non_blocking=True, memory_format=memory_format)
        yield (images / 255 - mean) / std, labels.to(device, non_blocking=True)


def learning_rate_factor(step: int, num_warm_up: float, num_steps: int) -> float:
    """Rise linearly over `num_warm_up` steps, then fall to 0 like half a cosine."""
    if step < num_warm_up:
        return (step + 1) / (num_warm_up + 1)
    return (1 + math.cos(math.pi * (step - num_warm_up) / (num_steps - num_warm_up))) / 2


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], autocast: torch.autocast, device: torch.device) -> Tensor:
    """Return the numbers of validation images that all ranks classify correctly, in the top 1 and the top 5. The model
    must not be in DDP, because ranks may have different numbers of batches."""
    model.eval()
    num_correct = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in batches:
        with autocast:
            logits = model(images)
        is_correct = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)  # (N, 5)
        num_correct += torch.stack((is_correct[:, 0].sum(), is_correct.sum()))
    dist.all_reduce(num_correct)
    return num_correct


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    loader, validation_loader = make_loaders(arguments, device)
    batch, num_classes = arguments.images_per_rank * dist.get_world_size(), len(loader.dataset.classes)
    torch.manual_seed(arguments.seed)
    torch.backends.cudnn.benchmark = True  # All training batches have one size.
    model = syncbn.convert_syncbn_model(ResNet(num_classes, arguments.blocks, arguments.width)).to(device)
    if arguments.channels_last:
        model.to(memory_format=torch.channels_last)
    compiled = torch.compile(model) if arguments.compile else model
    ddp = parallel(compiled)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=arguments.amp)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": vectors}]
    optimizer = torch.optim.SGD(groups, momentum=arguments.momentum)

    epochs: list[dict[str, float]] = []  # the results of each epoch
    state = load(arguments.checkpoint) if arguments.checkpoint is not None else None
    if state is not None:
        model.load_state_dict(state["model"])
        options = optimizer.state_dict()["param_groups"]  # The options of this command line replace the saved options.
        optimizer.load_state_dict({**state["optimizer"], "param_groups": options})
        epochs = state["epochs"]

    num_epochs, num_steps = arguments.epochs, len(loader)
    with progress(len(epochs) * num_steps, num_epochs * num_steps) as advance:
        for epoch in range(len(epochs), num_epochs):
            start, loss_text = time.monotonic(), ""
            loader.dataset.epoch = epoch  # The workers of this epoch, which do not exist yet, copy the data set.
            loader.sampler.set_epoch(epoch)
            ddp.train()
            losses = torch.zeros(1, dtype=torch.float64, device=device)
            batches = normalised_batches(loader, device, arguments.channels_last)
            for step, (images, labels) in enumerate(batches, start=epoch * num_steps):
                factor = learning_rate_factor(step, arguments.warm_up * num_steps, num_epochs * num_steps)
                for group in optimizer.param_groups:
                    group["lr"] = arguments.learning_rate * batch / 256 * factor
                with autocast:
                    loss = F.cross_entropy(ddp(images), labels, label_smoothing=arguments.label_smoothing)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += loss.detach()
                if step % STEPS_PER_LOSS == 0:
                    loss_text = f"loss {loss.item():.3f}"
                advance(f"epoch {epoch + 1}/{num_epochs}  {loss_text}")
            dist.all_reduce(losses)
            mean_loss = losses.item() / (num_steps * dist.get_world_size())
            speed = num_steps * batch / (time.monotonic() - start)
            if not math.isfinite(mean_loss):
                sys.exit(f"the loss of epoch {epoch + 1} is {mean_loss}; lower --learning-rate")
            batches = normalised_batches(validation_loader, device, arguments.channels_last)
            num_correct = evaluate(compiled, batches, autocast, device)
            # validation_loader.dataset is the Subset of this rank.
            top_1, top_5 = (num_correct / len(validation_loader.dataset.dataset)).tolist()
            epochs.append({"loss": mean_loss, "top-1": top_1, "top-5": top_5, "images per second": speed})
            if dist.get_rank() == 0:
                accuracies = f"top-1 {top_1:.2%}, top-5 {top_5:.2%}"
                print(f"epoch {epoch + 1}/{num_epochs}: loss {mean_loss:.4f}, {accuracies}, {speed:.0f} images/s")
            if arguments.checkpoint is not None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epochs}
                save(arguments.checkpoint, state)
    if dist.get_rank() == 0:
        write(arguments, {"epochs": epochs})


if __name__ == "__main__":
    run_on_ranks(job, parser)
