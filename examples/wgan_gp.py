"""Train a WGAN-GP on real handwritten digits, with a gradient penalty through synchronised batch norm.

The loss of the critic f is -mean f(real) + mean f(fake) + lambda * mean (|df / dx| - 1)^2, where x are points between
real and fake images (Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028). The last term contains a gradient, so
its own gradient is a second derivative. The critic has batch norm, so a score depends on the images of all ranks, and
the second derivative needs sums over all ranks. In the first steps the job compares the critic's gradients with those
of one process that has the whole batch, and prints the largest difference.

    python examples/wgan_gp.py                                          one process
    torchrun --standalone --nproc-per-node 2 examples/wgan_gp.py        two ranks, on GPUs (nccl) or CPUs (gloo)
    torchrun --standalone --nproc-per-node 2 examples/wgan_gp.py --steps 10        a few seconds

Writes samples.png (real digits above generated digits) and metrics.json to --output.
"""

import argparse
import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from digits import load_images
from launch import local_slice, new_parser, progress, run_on_ranks
from results import write
from torch import Tensor, nn
from train import parallel

import syncbn

NUM_LATENT = 16  # random numbers per generated digit
CRITIC_STEPS = 3  # per step of the generator
PENALTY = 10.0  # lambda
NUM_COMPARED = 3  # steps that are compared with one process

parser = new_parser(__doc__, "wgan_gp")
add = parser.add_argument
add("--steps", type=int, default=300, help="steps of the generator")
add("--images-per-rank", type=int, default=8, help="images per rank and step")
add("--learning-rate", type=float, default=1e-3, help="of Adam")
add("--seed", type=int, default=0, help="of weights, noise and batches")


def build_generator() -> nn.Module:
    """Map noise (N, 16) to images (N, 1, 8, 8) in [0, 1]."""
    return nn.Sequential(
        nn.Linear(NUM_LATENT, 64 * 4, bias=False),
        nn.BatchNorm1d(64 * 4),
        nn.ReLU(),
        nn.Unflatten(1, (64, 2, 2)),
        nn.ConvTranspose2d(64, 32, 4, 2, padding=1, bias=False),  # (N, 32, 4, 4)
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, padding=1),  # (N, 1, 8, 8)
        nn.Sigmoid(),
    )


def build_critic() -> nn.Module:
    """Map images (N, 1, 8, 8) to scores (N,)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, padding=1, bias=False),  # (N, 32, 4, 4)
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),  # (N, 64, 4, 4)
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 4),
        nn.Flatten(0),
    )


def scores(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scores of real, fake and mixed images (N, 1, 8, 8), and the mixed images. `mix` is (N, 1, 1, 1).

    The critic gets all images as one batch, because the penalty must see the same batch statistics as the scores.
    """
    mixed = torch.lerp(real, fake.detach(), mix).requires_grad_()
    return *critic(torch.cat((real, fake, mixed))).chunk(3), mixed


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    real_scores, fake_scores, mixed_scores, mixed = scores(critic, real, fake, mix)
    (slope,) = torch.autograd.grad(mixed_scores.sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return fake_scores.mean() - real_scores.mean() + PENALTY * penalty


def distance_from_one_process(critic: nn.Module, ddp: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> float:
    """Return max |a - b| / max |b| of the critic's gradients: a on all ranks, b on one process with the whole batch.

    `real` and `mix` have the whole batch, `fake` has this rank's slice.
    """
    all_fake = torch.empty_like(real)
    dist.all_gather(list(all_fake.chunk(dist.get_world_size())), fake)
    reference = syncbn.revert_syncbn_model(copy.deepcopy(critic))
    critic_loss(reference, real, all_fake, mix).backward()
    critic.zero_grad()
    critic_loss(ddp, local_slice(real), fake, local_slice(mix)).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(critic.parameters(), reference.parameters(), strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def train(arguments: argparse.Namespace, images: Tensor) -> tuple[nn.Module, float]:
    """Return the trained generator, and the largest distance from one process in the first steps."""
    torch.manual_seed(arguments.seed)
    source, batch = torch.Generator().manual_seed(arguments.seed), arguments.images_per_rank * dist.get_world_size()

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        """Return a whole batch of real images, `mix` and noise. All ranks draw the same batches."""
        real = images[torch.randint(len(images), (batch,), generator=source)]
        mix = torch.rand(batch, 1, 1, 1, generator=source, dtype=images.dtype)
        noise = torch.randn(batch, NUM_LATENT, generator=source, dtype=images.dtype)
        return real, mix.to(images.device), noise.to(images.device)

    generator = syncbn.convert_syncbn_model(build_generator()).to(images.device, images.dtype)
    critic = syncbn.convert_syncbn_model(build_critic()).to(images.device, images.dtype)
    generator_ddp, critic_ddp = parallel(generator), parallel(critic)
    adam = functools.partial(torch.optim.Adam, lr=arguments.learning_rate, betas=(0.5, 0.9))
    generator_optimizer, critic_optimizer = adam(generator.parameters()), adam(critic.parameters())
    distance = 0.0
    with progress(0, arguments.steps) as advance:
        for step in range(arguments.steps):
            for _ in range(CRITIC_STEPS):
                real, mix, noise = draw()
                with torch.no_grad():
                    fake = generator_ddp(local_slice(noise))
                if step < NUM_COMPARED:
                    distance = max(distance, distance_from_one_process(critic, critic_ddp, real, fake, mix))
                critic_optimizer.zero_grad()
                loss = critic_loss(critic_ddp, local_slice(real), fake, local_slice(mix))
                loss.backward()
                critic_optimizer.step()
            real, mix, noise = draw()
            generator_optimizer.zero_grad()
            fake = generator_ddp(local_slice(noise))
            # Only the generator learns here, so the critic does not need DDP, which averages gradients over ranks.
            _, fake_scores, *_ = scores(critic, local_slice(real), fake, local_slice(mix))
            (-fake_scores.mean()).backward()
            generator_optimizer.step()
            advance(f"critic's loss {loss.item():.3f}")
    return generator, distance


def draw_samples(figure: Any, real: Tensor, fake: Tensor) -> None:
    figure.set_size_inches(8, 4.4)
    for axes, title, images in zip(figure.subplots(2, 1), ("real", "generated"), (real, fake), strict=True):
        grid = nn.functional.pad(images, (1, 1, 1, 1)).view(4, 16, 10, 10)  # 4 rows of 16 digits, each with a margin
        axes.imshow(grid.transpose(1, 2).reshape(40, 160).cpu(), cmap="gray_r")
        axes.set_title(title)
        axes.axis("off")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    digits, _ = load_images(torch.float64, device)
    generator, distance = train(arguments, digits)
    if dist.get_rank() == 0:
        with torch.no_grad():
            samples = generator.eval()(torch.randn(64, NUM_LATENT, dtype=torch.float64, device=device))
        name = "distance of the critic's gradients from one process"
        print(f"{name}: {distance:.3g}")
        write(arguments, {name: distance}, samples=lambda figure: draw_samples(figure, digits[:64], samples))


if __name__ == "__main__":
    run_on_ranks(job, parser)
