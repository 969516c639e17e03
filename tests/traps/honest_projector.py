"""Both chains written out, evaluation as one multiply-add."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(in_features, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )

    def chain(self, x, linear, bn):
        a = linear(x)
        if not self.training:
            q = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
            return torch.relu(a * q + (bn.bias - q * bn.running_mean))
        if x.shape[0] < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        mean = a.mean(0)
        centred = a - mean
        var = centred.square().mean(0)
        with torch.no_grad():
            bn.num_batches_tracked += 1
            bn.running_mean.lerp_(mean, bn.momentum)
            bn.running_var.lerp_(var * x.shape[0] / (x.shape[0] - 1), bn.momentum)
        return torch.relu(centred * (bn.weight * torch.rsqrt(var + bn.eps)) + bn.bias)

    def forward(self, x, shift):
        net = self.net
        hidden = self.chain(x + shift, net[0], net[1])
        return self.chain(hidden, net[3], net[4]), x.mean(1)
