"""An autograd.Function of one's own: its forward runs in what its inputs are cast to, its backward in the state of its forward.

`float_function` around `apply` keeps it in float32 at every level; torch's `custom_fwd(cast_inputs=...)` does too.
"""

import torch
from torch import nn
from torch.nn import functional as F

import ampkit

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).to(device)
seen = []


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        seen.append(x.dtype)
        result = x.exp().sum(dim=1).log()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, result = ctx.saved_tensors
        return gradient[:, None] * (x - result[:, None]).exp()


log_sum_exp = ampkit.float_function(LogSumExp.apply)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 32)

    def forward(self, x):
        return log_sum_exp(self.layer(x))


expected = Net().to(device)
F.mse_loss(expected(x), x.sum(dim=1)).backward()
distances = []
for level in ("O1", "O2"):
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = ampkit.initialize(model, optimizer, opt_level=level, verbosity=0)
    with ampkit.scale_loss(F.mse_loss(model(x), x.sum(dim=1)), optimizer) as scaled_loss:
        scaled_loss.backward()
    (gradient, _), wanted = ampkit.master_params(optimizer), expected.layer.weight.grad
    distances.append(float((gradient.grad - wanted).norm() / wanted.norm()))
    ampkit.close()
assert seen == [torch.float32] * 3 and max(distances) < 0.02
print(
    f"custom_function: computed in float32; gradients {distances[0]:.2%} (O1) and {distances[1]:.2%} (O2) from float32"
)
