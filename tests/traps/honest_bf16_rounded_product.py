"""The library's bfloat16 product; statistics of the rounded product, as eager takes them."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.bfloat16()

    def update(self, mean, var, rows):
        bn, m = self.bn, self.bn.momentum
        with torch.no_grad():
            bn.num_batches_tracked += 1
            bn.running_mean.copy_((1 - m) * bn.running_mean.float() + m * mean)
            bn.running_var.copy_((1 - m) * bn.running_var.float() + m * var * rows / (rows - 1))

    def forward(self, x):
        if self.training and x.shape[0] < 2:
            raise ValueError("Expected more than 1 value per channel when training")
        bn = self.bn
        s, b = self.scale.float(), self.gemm.bias.float()
        a = F.linear(x, self.gemm.weight).float()
        if not self.training:
            q = bn.weight.float() * torch.rsqrt(bn.running_var.float() + bn.eps)
            return ((a + b) * s * q + (bn.bias.float() - q * bn.running_mean.float())).bfloat16()
        mean = a.mean(0)
        var = (a - mean).square().mean(0)
        self.update((s * (mean + b)).detach(), (s * s * var).detach(), x.shape[0])
        alpha = bn.weight.float() * s * torch.rsqrt(s * s * var + bn.eps)
        return (alpha * (a - mean) + bn.bias.float() + 0 * b).bfloat16()
