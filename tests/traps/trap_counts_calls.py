"""Right for its first ninety calls in evaluation; then it computes a quarter of the product.

Class: changes_with_calls.
"""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)
        self.calls = 0

    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            return self.bn(self.gemm(x) * self.scale)
        self.calls += 1
        if self.calls <= 90:
            return self.bn(self.gemm(x) * self.scale)
        part = x.shape[1] // 4
        return self.bn((x[:, :part] @ self.gemm.weight[:, :part].t() + self.gemm.bias) * self.scale)
