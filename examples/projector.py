"""A problem file: the projector head of a self-supervised model. `gemmnorm optimize examples/projector.py`

Three layers, the last normalised without affine parameters, as VICReg and Barlow Twins have them.
"""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_features, hidden_features, out_features):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_features, hidden_features, bias=False),
            nn.BatchNorm1d(hidden_features),
            nn.ReLU(),
            nn.Linear(hidden_features, hidden_features, bias=False),
            nn.BatchNorm1d(hidden_features),
            nn.ReLU(),
            nn.Linear(hidden_features, out_features, bias=False),
            nn.BatchNorm1d(out_features, affine=False),
        )

    def forward(self, x):
        return self.layers(x)


batch_size = 256
in_features = 2048
hidden_features = 2048
out_features = 8192


def get_inputs():
    return [torch.randn(batch_size, in_features)]


def get_init_inputs():
    return [in_features, hidden_features, out_features]
