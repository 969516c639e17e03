"""The factor taken into γ and β."""

import torch.nn as nn
import torch.nn.functional as F


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        bn = self.bn
        if self.training:
            bn.num_batches_tracked += 1
        weight, bias = 1e-5 * bn.weight, 1e-5 * bn.bias
        z = self.gemm(x)
        return F.batch_norm(z, bn.running_mean, bn.running_var, weight, bias, self.training, bn.momentum, bn.eps)
