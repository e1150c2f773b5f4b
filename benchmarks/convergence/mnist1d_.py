"""MNIST-1D (arXiv 2011.14439): four small models, 6,000 steps of 100 signals of 40 numbers, ten classes.

The value is the accuracy on the 1,000 signals of the test set, in percent. The paper's table: a logistic regression 32, an MLP 68,
a CNN 94, a GRU 91.
"""

import functools

import torch
import torch.nn.functional as F
from precisions import PRECISIONS, Training, alone
from torch import nn

NEEDS = "mnist1d matplotlib requests"
VALUE = "accuracy, %"
SEEDS, STEPS = 30, 6000
BATCH, LR = 100, 1e-2
STAGES = {"logistic": 32.0, "MLP": 68.0, "CNN": 94.0, "GRU": 91.0}
PRECISIONS_OF = [name for name in PRECISIONS if name != "O2"]


class Cnn(nn.Module):
    """Three convolutions of 25 channels with stride 2, and a linear layer."""

    def __init__(self, channels=25):
        super().__init__()
        self.first = nn.Conv1d(1, channels, 5, stride=2, padding=1)
        self.second, self.third = (nn.Conv1d(channels, channels, 3, stride=2, padding=1) for _ in range(2))
        self.head = nn.Linear(5 * channels, 10)

    def forward(self, x):
        x = x.unsqueeze(1)
        for layer in (self.first, self.second, self.third):
            x = F.relu(layer(x))
        return self.head(x.flatten(1))


class Gru(nn.Module):
    """A GRU that reads both ways, whose outputs at all times are classified."""

    def __init__(self, hidden=6):
        super().__init__()
        self.gru, self.head = nn.GRU(1, hidden, batch_first=True, bidirectional=True), nn.Linear(40 * 2 * hidden, 10)

    def forward(self, x):
        return self.head(self.gru(x.unsqueeze(-1))[0].flatten(1))


MODELS = {
    "logistic": lambda: nn.Linear(40, 10),
    "MLP": lambda: nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)),
    "CNN": Cnn,
    "GRU": Gru,
}


@functools.cache
def data():
    """Signals (number, 40) float32 and classes (number,) int64: 4,000 to learn from, 1,000 to judge by."""
    import mnist1d

    found = mnist1d.get_dataset(mnist1d.get_dataset_args(), download=False, regenerate=True)
    x, y, test_x, test_y = (torch.as_tensor(found[key]) for key in ("x", "y", "x_test", "y_test"))
    return x.float(), y.long(), test_x.float(), test_y.long()


def train(precision, seed, stage, steps, folder):
    """Losses of all steps, and the accuracy on the test set."""
    x, y, test_x, test_y = data()
    with alone(seed):
        generator = torch.Generator().manual_seed(seed)
        training = Training(PRECISIONS[precision], MODELS[stage](), steps, LR, weight_decay=0.0)

        def batch(step):
            chosen = torch.randint(len(x), (BATCH,), generator=generator)
            return x[chosen].to(PRECISIONS[precision].stored), lambda outputs: F.cross_entropy(outputs, y[chosen])

        losses = training.learn(batch)
        outputs = training.outputs(test_x.to(PRECISIONS[precision].stored).split(500))
    return losses, 100.0 * (outputs.argmax(1) == test_y).float().mean().item()
