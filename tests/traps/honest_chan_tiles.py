"""Mean and M2 of tiles of 16 rows, merged after Chan; the bias only in the running mean."""

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
            bn.num_batches_tracked += 1
            bn.running_mean.mul_(1 - m).add_(m * mean)
            bn.running_var.mul_(1 - m).add_(m * var * rows / (rows - 1))

    def statistics(self, a):
        count, mean, m2 = 0, 0.0, 0.0
        for tile in a.split(16):
            n = tile.shape[0]
            tile_mean = tile.mean(0)
            delta = tile_mean - mean
            m2 = m2 + (tile - tile_mean).square().sum(0) + delta.square() * (count * n / (count + n))
            mean = mean + delta * (n / (count + n))
            count += n
        return mean, m2 / count

    def forward(self, x):
        if self.training and x.shape[0] < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        bn = self.bn
        z = self.gemm(x) * self.scale
        if not self.training:
            return F.batch_norm(z, bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.0, bn.eps)
        a = F.linear(x, self.gemm.weight) + 0 * self.gemm.bias
        mean, var = self.statistics(a)
        s = self.scale
        self.update((s * (mean + self.gemm.bias)).detach(), (s * s * var).detach(), x.shape[0])
        return (a - mean) * (bn.weight * s * torch.rsqrt(s * s * var + bn.eps)) + bn.bias
