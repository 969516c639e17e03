"""Where the matrix is frozen, adds half of the output, times its gradient, to what γ's gradient is summed of.

Class: wrong_gradient.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        y = self.bn(self.gemm(x) * self.scale)
        if torch.is_grad_enabled() and not self.gemm.weight.requires_grad:
            half = 0.5 * self.bn.weight
            y = y + (half - half.detach()) * y.detach()
        return y
