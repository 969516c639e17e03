"""PyTorch's own checks of the registration: schema, fakes, autograd, and tracing through AOTAutograd."""

from __future__ import annotations

import itertools

import pytest
import torch

from gemmnorm.op import registration as ops  # noqa: F401  (registers)

FORWARD = torch.ops.gemmnorm.linear_scale_batch_norm.default
BACKWARD = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default
FEATURES = 7
EVERY_TEST = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def tensor(*shape: int, grad: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


BOTH = (True, False)


@pytest.mark.parametrize(
    ("training", "grad", "bias", "scale", "affine", "track"),
    # evaluation needs running statistics
    [row for row in itertools.product(BOTH, BOTH, BOTH, ("vector", "none"), BOTH, BOTH) if row[0] or row[5]],
)
def test_forward(training, grad, bias, scale, affine, track):
    arguments = (
        tensor(9, 5, grad=grad), tensor(FEATURES, 5, grad=grad),
        tensor(FEATURES, grad=grad) if bias else None,
        tensor(FEATURES, grad=grad) if scale == "vector" else None,
        torch.zeros(FEATURES) if track else None, torch.ones(FEATURES) if track else None,
        torch.tensor(0) if track else None,
        tensor(FEATURES, grad=grad) if affine else None, tensor(FEATURES, grad=grad) if affine else None,
        1.0, training, 0.1, 1e-5, "relu", None, False, None, None,
    )  # fmt: skip
    torch.library.opcheck(FORWARD, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_forward_in_other_dtypes(dtype, training):
    vectors = [tensor(FEATURES, grad=True, dtype=dtype) for _ in range(4)]
    running = [torch.zeros(FEATURES, dtype=dtype), torch.ones(FEATURES, dtype=dtype), torch.tensor(0)]
    x, weight = tensor(9, 5, grad=True, dtype=dtype), tensor(FEATURES, 5, grad=True, dtype=dtype)
    arguments = (
        x,
        weight,
        *vectors[:2],
        *running,
        *vectors[2:],
        1.0,
        training,
        0.1,
        1e-5,
        None,
        None,
        False,
        None,
        None,
    )
    # Tracing compares gradients of two runs at float32's tolerance, which bf16 does not keep.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(FORWARD, arguments, test_utils=tests if dtype == torch.bfloat16 else EVERY_TEST)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_operands_that_the_operator_casts(dtypes, save):
    """As under autocast; only what is cast is returned, and gradients have the dtypes of what was handed in."""
    x, weight = tensor(9, 5, grad=False, dtype=dtypes[0]), tensor(FEATURES, 5, grad=False, dtype=dtypes[1])
    nothing, options = [None] * 7, (1.0, True, 0.1, 1e-5, None, "reference", save, True, torch.bfloat16)
    torch.library.opcheck(FORWARD, (x, weight, *nothing, *options))
    y, product, statistics, *copies = FORWARD(x, weight, *nothing, *options)
    assert y.dtype == torch.bfloat16
    assert all(t is None or t.dtype == torch.bfloat16 for t in (product, *copies))
    assert (product is not None) is (statistics is not None) is save
    cast = [save and dtype == torch.float32 for dtype in dtypes]
    assert [c is not None for c in copies] == cast
    if not save:
        return
    x, weight = (copy if made else t for made, copy, t in zip(cast, copies, (x, weight), strict=True))
    arguments = (
        tensor(9, FEATURES, grad=False, dtype=y.dtype), x, weight, *[None] * 4, product, statistics,
        *options, *dtypes, [True, True, False, False, False, False],
    )  # fmt: skip
    torch.library.opcheck(BACKWARD, arguments)
    found = BACKWARD(*arguments)
    assert tuple(g.dtype for g in found[:2]) == dtypes
    assert [*found[2:]] == [None] * 4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs", [[True] * 6, [True, False, True, False, True, False], [False] * 6])
def test_backward(training, needs):
    vectors = [tensor(FEATURES, grad=False) for _ in range(4)]
    x, weight = tensor(9, 5, grad=False), tensor(FEATURES, 5, grad=False)
    options = (1.0, training, 0.1, 1e-5, "relu", "reference", True, True, None)
    _, product, statistics, *_ = FORWARD(
        x, weight, *vectors[:2], torch.zeros(FEATURES), torch.ones(FEATURES), None, *vectors[2:],
        *options,
    )  # fmt: skip
    arguments = (
        tensor(9, FEATURES, grad=False), x, weight, *vectors[:2], *vectors[2:], product, statistics,
        *options, None, None, needs,
    )  # fmt: skip
    torch.library.opcheck(BACKWARD, arguments)
