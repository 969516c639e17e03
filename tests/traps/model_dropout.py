"""Linear, BatchNorm, ReLU, and dropout in training."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        return self.drop(F.relu(self.bn(self.gemm(x))))


def get_inputs():
    return [torch.randn(160, 40)]


def get_init_inputs():
    return [40, 24]
