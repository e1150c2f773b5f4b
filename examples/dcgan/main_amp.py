"""A DCGAN on handwritten digits in mixed precision: two models, two optimizers, three losses with a loss scaler each.

$ python main_amp.py --opt-level O1
$ python main_amp.py --opt-level O2 --iters 100
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torchvision.utils import save_image

import ampkit

REAL, FAKE, FOOLED = range(3)  # the losses, as loss_id
IMAGE_SIZE, NOISE = 32, 64


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a DCGAN on handwritten digits.", allow_abbrev=False)
    add = parser.add_argument
    add("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3", "O4", "O5"])
    add("--iters", type=int, default=300, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N")
    add("--width", type=int, default=32, metavar="N", help="channels of the widest image (default: 32)")
    add("--lr", type=float, default=2e-4)
    add("--seed", type=int, default=0)
    add("--print-freq", type=int, default=50, metavar="N", help="iterations between lines")
    add("--out", type=Path, default=Path("dcgan"), metavar="DIR", help="where fake.png goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    args = parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    images = load_images().to(device)
    generator, discriminator = Generator(args.width).to(device), Discriminator(args.width).to(device)
    for model in (generator, discriminator):
        model.apply(initialize_weights)
    adam = {"lr": args.lr, "betas": (0.5, 0.999)}
    optimizers = [torch.optim.Adam(model.parameters(), **adam) for model in (discriminator, generator)]

    [discriminator, generator], [optimizer_d, optimizer_g] = ampkit.initialize(
        [discriminator, generator], optimizers, opt_level=args.opt_level, num_losses=3
    )

    random = torch.Generator().manual_seed(args.seed)  # the same batches and noise at every level
    fixed = torch.randn(64, NOISE, generator=random).to(device)
    rows = []
    for iteration in range(1, args.iters + 1):
        real = images[torch.randint(len(images), (args.batch_size,), generator=random).to(device)]
        noise = torch.randn(args.batch_size, NOISE, generator=random).to(device)

        # The discriminator: real images are to be 1, fakes 0. Two losses, two backward passes, one step.
        optimizer_d.zero_grad()
        on_real = discriminator(real)
        loss_real = judge(on_real, 1.0)
        with ampkit.scale_loss(loss_real, optimizer_d, loss_id=REAL) as scaled_loss:
            scaled_loss.backward()
        fake = generator(noise)
        on_fake = discriminator(fake.detach())
        loss_fake = judge(on_fake, 0.0)
        with ampkit.scale_loss(loss_fake, optimizer_d, loss_id=FAKE) as scaled_loss:
            scaled_loss.backward()
        optimizer_d.step()

        # The generator: its fakes are to be taken for real. The backward pass reaches the discriminator's weights too; their
        # gradients are cleared before its next step.
        optimizer_g.zero_grad()
        loss_fooled = judge(discriminator(fake), 1.0)
        with ampkit.scale_loss(loss_fooled, optimizer_g, loss_id=FOOLED) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()

        if iteration % args.print_freq == 0 or iteration == args.iters:
            losses = [loss.item() for loss in (loss_real, loss_fake, loss_fooled)]
            scores = [output.float().sigmoid().mean().item() for output in (on_real, on_fake)]
            scales = [scaler["loss_scale"] for scaler in ampkit.state_dict().values()]
            rows.append(
                {"real": losses[0], "fake": losses[1], "fooled": losses[2], "D(x)": scores[0], "D(G(z))": scores[1]}
            )
            print(
                f"{iteration:4}: D {losses[0] + losses[1]:.3f}  G {losses[2]:.3f}  D(x) {scores[0]:.2f}  D(G(z)) {scores[1]:.2f}  "
                f"scales {' '.join(f'{scale:g}' for scale in scales)}"
            )

    args.out.mkdir(parents=True, exist_ok=True)
    generator.eval()
    with torch.no_grad():
        save_image(generator(fixed).float().cpu(), args.out / "fake.png", normalize=True, value_range=(-1, 1))
    print(f"fakes: {args.out / 'fake.png'}")
    return rows


def load_images() -> torch.Tensor:
    """Load scikit-learn's handwritten digits, one channel, -1 to 1."""
    small = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    return F.interpolate(small, size=IMAGE_SIZE, mode="bilinear", align_corners=False)


def judge(output: torch.Tensor, target: float) -> torch.Tensor:
    """Cross-entropy from logits: `F.binary_cross_entropy` needs more than lower precision has, and is refused in it."""
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, target))


class Generator(nn.Sequential):
    """A generator from noise (N, 64) to images (N, 1, 32, 32)."""

    def __init__(self, width: int):
        layers: list[nn.Module] = [nn.Unflatten(1, (NOISE, 1, 1))]
        for channels, wider, stride, padding in ((NOISE, 4, 1, 0), (4 * width, 2, 2, 1), (2 * width, 1, 2, 1)):
            layers.append(nn.ConvTranspose2d(channels, wider * width, 4, stride, padding, bias=False))
            layers += [nn.BatchNorm2d(wider * width), nn.ReLU()]
        super().__init__(*layers, nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False), nn.Tanh())


class Discriminator(nn.Sequential):
    """A discriminator from images to logits (N,): above 0 for real."""

    def __init__(self, width: int):
        layers: list[nn.Module] = [nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
        for channels in (width, 2 * width):
            layers.append(nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False))
            layers += [nn.BatchNorm2d(2 * channels), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def initialize_weights(module: nn.Module) -> None:
    """Draw weights from N(0, 0.02), as in Radford et al., 2016."""
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
