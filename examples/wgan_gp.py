"""Train a WGAN-GP on real handwritten digits, with a gradient penalty through synchronised batch norm.

The critic f is trained on -mean f(real) + mean f(fake) + lambda * mean (|df / dx| - 1)^2 at points x between real and
fake images (Gulrajani et al. 2017, https://arxiv.org/abs/1704.00028). The last term is a gradient inside the loss, so
its own gradient is a second derivative. The critic has batch norm, so this is a second derivative of the batch over all
ranks. The first steps are also computed by one process with the whole batch; the largest difference of its critic's
gradients is printed.

    python examples/wgan_gp.py                                          one process
    torchrun --standalone --nproc-per-node 2 examples/wgan_gp.py        two ranks: nccl when each has a GPU, else gloo
    torchrun --standalone --nproc-per-node 2 examples/wgan_gp.py --steps 10        a few seconds

Writes samples.png (real digits above generated digits) and metrics.json to --output.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from digits import load_images
from launch import new_parser, own, parallel, positive, progress_bar, rank, run_on_ranks, world_size, write
from torch import Tensor, nn

import syncbn

NUM_LATENT = 16  # random numbers per generated digit
CRITIC_STEPS = 3  # per step of the generator
PENALTY = 10.0  # lambda
NUM_COMPARED = 3  # first steps that are compared with one process

parser = new_parser(__doc__, "wgan_gp")
add = parser.add_argument
add("--steps", type=positive, default=300, help="steps of the generator")
add("--images-per-rank", type=positive, default=8, help="images per rank and step")
add("--learning-rate", type=float, default=1e-3, help="of Adam")
add("--seed", type=int, default=0, help="of weights, noise and batches")


def build_generator() -> nn.Module:
    """(N, 16) noise -> (N, 1, 8, 8) images in [0, 1]."""
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
    """(N, 1, 8, 8) images -> (N,) scores."""
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
    """Return the scores of real, fake and mixed images (N, 1, 8, 8), and the mixed images; `mix` is (N, 1, 1, 1).

    All images are in one batch, because the penalty must see the same normalisation as the scores.
    """
    mixed = torch.lerp(real, fake.detach(), mix).requires_grad_()
    return *critic(torch.cat((real, fake, mixed))).chunk(3), mixed


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> Tensor:
    """Return the critic's loss, with the penalty."""
    real_scores, fake_scores, mixed_scores, mixed = scores(critic, real, fake, mix)
    (slope,) = torch.autograd.grad(mixed_scores.sum(), mixed, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return fake_scores.mean() - real_scores.mean() + PENALTY * penalty


def distance_from_one_process(critic: nn.Module, ddp: nn.Module, real: Tensor, fake: Tensor, mix: Tensor) -> float:
    """Return max |a - b| / max |b| of the critic's gradients: a on W ranks, b on one process with the whole batch."""
    if dist.is_initialized():
        fakes = [torch.empty_like(fake) for _ in range(world_size())]
        dist.all_gather(fakes, fake)
        fake = torch.cat(fakes)
    reference = syncbn.revert_syncbn_model(copy.deepcopy(critic))
    critic_loss(reference, real, fake, mix).backward()
    critic.zero_grad()
    critic_loss(ddp, own(real), own(fake), own(mix)).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(critic.parameters(), reference.parameters(), strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def train(arguments: argparse.Namespace, images: Tensor) -> tuple[nn.Module, float]:
    """Return the trained generator, and the largest distance from one process in the first steps."""
    torch.manual_seed(arguments.seed)
    source, batch = torch.Generator().manual_seed(arguments.seed), arguments.images_per_rank * world_size()

    def draw(distribution: Callable[..., Tensor], *shape: int) -> Tensor:
        """Return a random tensor for the whole batch, the same on every rank."""
        return distribution(batch, *shape, generator=source, dtype=torch.float64).to(images.device)

    def draw_real() -> Tensor:
        return images[torch.randint(len(images), (batch,), generator=source)]

    def prepare(model: nn.Module) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = syncbn.convert_syncbn_model(model).to(images.device, torch.float64)
        return model, parallel(model), torch.optim.Adam(model.parameters(), arguments.learning_rate, betas=(0.5, 0.9))

    generator, generator_ddp, generator_optimizer = prepare(build_generator())
    critic, critic_ddp, critic_optimizer = prepare(build_critic())
    distance = 0.0
    with progress_bar(0, arguments.steps) as advance:
        for step in range(arguments.steps):
            for _ in range(CRITIC_STEPS):
                real, mix, noise = draw_real(), draw(torch.rand, 1, 1, 1), draw(torch.randn, NUM_LATENT)
                with torch.no_grad():
                    fake = generator_ddp(own(noise))
                if step < NUM_COMPARED:
                    distance = max(distance, distance_from_one_process(critic, critic_ddp, real, fake, mix))
                critic_optimizer.zero_grad()
                loss = critic_loss(critic_ddp, own(real), fake, own(mix))
                loss.backward()
                critic_optimizer.step()
            generator_optimizer.zero_grad()
            fake = generator_ddp(own(draw(torch.randn, NUM_LATENT)))
            # The critic's gradients are not used here, so it needs no DDP.
            _, fake_scores, *_ = scores(critic, own(draw_real()), fake, own(draw(torch.rand, 1, 1, 1)))
            (-fake_scores.mean()).backward()
            generator_optimizer.step()
            advance(f"critic's loss {loss.item():.3f}")
    return generator, distance


def draw_samples(figure: Any, real: Tensor, fake: Tensor) -> None:
    figure.set_size_inches(8, 4.4)
    for axes, title, images in zip(figure.subplots(2, 1), ("real", "generated"), (real, fake), strict=True):
        rows = [torch.cat(list(nn.functional.pad(row, (1, 1, 1, 1))), 1) for row in images.squeeze(1).split(16)]
        axes.imshow(torch.cat(rows).cpu(), cmap="gray_r")
        axes.set_title(title)
        axes.axis("off")


def job(arguments: argparse.Namespace, device: torch.device) -> None:
    digits, _ = load_images(torch.float64, device)
    generator, distance = train(arguments, digits)
    if rank() == 0:
        with torch.no_grad():
            samples = generator.eval()(torch.randn(64, NUM_LATENT, dtype=torch.float64, device=device))
        name = "distance of the critic's gradients from one process"
        print(f"{name}: {distance:.3g}")
        write(arguments, {name: distance}, samples=lambda figure: draw_samples(figure, digits[:64], samples))


if __name__ == "__main__":
    run_on_ranks(job, parser)
