"""The backward formulas against finite differences, in float64, through the operator itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from gemmnorm import linear_scale_batch_norm

FEATURES = 3
SCALES = {"none": None, "vector": (FEATURES,), "row": (1, FEATURES), "one": (1,), "scalar": ()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("bias", "affine"), list(itertools.product([True, False], repeat=2)))
def test_every_option(training, scale, bias, affine):
    shape = SCALES[scale]
    tensors = [random(5, 4), random(FEATURES, 4)]
    tensors += [random(FEATURES)] if bias else []
    tensors += [random(*shape)] if shape is not None else []
    tensors += [random(FEATURES), random(FEATURES)] if affine else []
    mean, var = torch.randn(FEATURES).double(), torch.rand(FEATURES).double() + 0.5

    def function(x, weight, *rest):
        left = list(rest)
        b = left.pop(0) if bias else None
        s = left.pop(0) if shape is not None else None
        gamma, beta = left or (None, None)
        return linear_scale_batch_norm(
            x, weight, b, s, mean.clone(), var.clone(), gamma, beta, training=training, eps=0.1, strategy="reference"
        )

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "activation", ["relu", "gelu", "gelu_tanh", "silu", "leaky_relu(0.3)", "tanh", "sigmoid", "hardtanh(-0.9,1.1)"]
)
def test_every_activation(training, activation):
    tensors = [
        random(5, 4),
        random(FEATURES, 4),
        random(FEATURES),
        random(FEATURES),
        random(FEATURES),
        random(FEATURES),
    ]
    mean, var = torch.zeros(FEATURES).double(), torch.ones(FEATURES).double()

    def function(x, weight, bias, scale, gamma, beta):
        return linear_scale_batch_norm(
            x, weight, bias, scale, mean.clone(), var.clone(), gamma, beta,
            training=training, activation=activation, strategy="reference",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, tensors, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("leave_out", range(6))
def test_one_tensor_without_gradient(leave_out):
    """What nobody asked for is neither computed nor needed by the rest."""
    tensors = [
        random(5, 4),
        random(FEATURES, 4),
        random(FEATURES),
        random(FEATURES),
        random(FEATURES),
        random(FEATURES),
    ]
    tensors[leave_out] = tensors[leave_out].detach()

    def function(x, weight, bias, scale, gamma, beta):
        return linear_scale_batch_norm(
            x, weight, bias, scale, None, None, gamma, beta, training=True, eps=0.1, strategy="reference"
        )

    assert torch.autograd.gradcheck(function, tensors)
    y = function(*tensors)
    y.sum().backward()
    assert [t.grad is None for t in tensors] == [i == leave_out for i in range(6)]
