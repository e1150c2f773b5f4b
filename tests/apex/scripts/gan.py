"""After the DCGAN pattern of Apex's examples: two models, two optimizers, three losses with a loss scale each."""

import argparse

import torch
from apex import amp, optimizers
from apex.fp16_utils import *  # noqa: F403
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--iterations", type=int, default=3)
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
args = parser.parse_args()

torch.backends.cudnn.benchmark = True
device = torch.device("cuda:0")
torch.manual_seed(0)


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.02)


netG = nn.Sequential(
    nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()
).to(device)
netD = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4, 1, 0)).to(device)
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(4, 8, 1, 1, device=device)
optimizerD = optimizers.FusedAdam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=args.opt_level, num_losses=3
)

for i in range(args.iterations):
    netD.zero_grad()
    real_cpu = torch.randn(4, 3, 8, 8).to(device)
    label = torch.full((4,), 1.0, device=device)
    output = netD(real_cpu).view(-1)
    errD_real = criterion(output, label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()

    noise = torch.randn(4, 8, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(0.0)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    optimizerD.step()

    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    torch.cuda.synchronize()
    print(f"[{i}] {errD_real.item() + errD_fake.item():.4f} {errG.item():.4f}")

with torch.no_grad():
    print("fake", netG(fixed_noise).float().type(), len(amp.state_dict()), amp._amp_state.loss_scalers[2].loss_scale())
