"""num_batches_tracked never moves.

Class: wrong_state.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def update(self, mean, var, rows):
        bn, m = self.bn, self.bn.momentum
        with torch.no_grad():
            bn.running_mean.mul_(1 - m).add_(m * mean)
            bn.running_var.mul_(1 - m).add_(m * var * rows / (rows - 1))

    def forward(self, x):
        if self.training and x.shape[0] < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        bn = self.bn
        z = self.gemm(x) * self.scale
        if not self.training:
            return F.batch_norm(z, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps)
        mean = z.mean(0)
        var = (z - mean).square().mean(0)
        self.update(mean.detach(), var.detach(), x.shape[0])
        return (z - mean) * torch.rsqrt(var + bn.eps) * bn.weight + bn.bias
