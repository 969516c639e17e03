"""Writes its outputs into eight buffers in turn where gradients are wanted: the ninth call overwrites the first's.

Class: shared_outputs.
"""

import torch
import torch.nn as nn


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, out):
        return out.copy_(y).view_as(out)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.ring = {}
        self.calls = 0

    def forward(self, x):
        y = self.bn(self.gemm(x) * self.scale)
        if not torch.is_grad_enabled():
            return y
        self.calls += 1
        key = self.calls % 8, y.shape
        if key not in self.ring:
            self.ring[key] = torch.empty_like(y)
        return Copied.apply(y, self.ring[key].detach())
