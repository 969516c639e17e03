"""Dropout as a mask and a factor of its own."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        y = F.relu(self.bn(self.gemm(x)))
        if not self.training:
            return y
        mask = F.dropout(torch.ones_like(y), 0.25) > 0
        return y * mask / 0.75
