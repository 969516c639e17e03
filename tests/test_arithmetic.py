"""Which arithmetic float32 gets: PyTorch's switches allow TF32 or not, gemmnorm's own asks for float32 arithmetic."""

from __future__ import annotations

import contextlib

import pytest
import torch

import gemmnorm
from gemmnorm import plan
from gemmnorm.cli import doctor
from gemmnorm.errors import GemmNormValueError
from gemmnorm.runtime import arithmetic as switches
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime.arithmetic import (
    arithmetic,
    convolutions_differ,
    float32_reason,
    tf32_allowed_to_convolutions,
)
from gemmnorm.runtime.operands import Operands, Options

MATMUL = torch.backends.cuda.matmul
NEW = hasattr(MATMUL, "fp32_precision")


@contextlib.contextmanager
def put_back():
    """PyTorch's switches, whichever of the two ways the body sets them."""
    before = MATMUL.fp32_precision if NEW else MATMUL.allow_tf32
    try:
        yield
    finally:
        if NEW:
            torch.backends.cuda.matmul.allow_tf32 = False
            MATMUL.fp32_precision = before
        else:
            MATMUL.allow_tf32 = before


@pytest.fixture(autouse=True)
def _switches():
    with put_back():
        yield


def set_precision(value):
    if not NEW:
        pytest.skip("this PyTorch has only allow_tf32")
    MATMUL.fp32_precision = value


SWITCHES = {
    "default": (lambda: None, "float32"),
    "allow_tf32 = False": (lambda: setattr(MATMUL, "allow_tf32", False), "float32"),
    "highest": (lambda: torch.set_float32_matmul_precision("highest"), "float32"),
    "ieee": (lambda: set_precision("ieee"), "float32"),
    "none": (lambda: set_precision("none"), "float32"),
    "allow_tf32 = True": (lambda: setattr(MATMUL, "allow_tf32", True), "tf32"),
    "high": (lambda: torch.set_float32_matmul_precision("high"), "tf32"),
    "tf32": (lambda: set_precision("tf32"), "tf32"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_float32_accuracy_wherever_tf32_is_not_allowed(name):
    switch, expected = SWITCHES[name]
    switch()
    assert arithmetic(torch.float32) == expected
    assert arithmetic(torch.bfloat16) == arithmetic(torch.float64) == "native"


@pytest.mark.parametrize("name", ["allow_tf32 = False", "highest", "ieee"])
def test_who_refuses_tf32_keeps_the_split_product(name, monkeypatch):
    SWITCHES[name][0]()
    monkeypatch.setattr(runtime, "chip", lambda device: plan.chip_for(90))
    monkeypatch.setattr(runtime.binding, "bind", lambda *_: None)
    x, weight = torch.empty(1024, 8192), torch.empty(8192, 8192)
    problem = runtime.describe(Operands(x, weight), Options())
    assert problem.split and runtime.resolve(problem, None) == "one_kernel"


@pytest.mark.parametrize("products", [False, True])
def test_convolutions_have_a_switch_of_their_own(products, monkeypatch):
    monkeypatch.setattr(switches, "tf32_allowed", lambda: products)
    assert tf32_allowed_to_convolutions() and convolutions_differ() is not products  # PyTorch's default
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        assert not tf32_allowed_to_convolutions() and convolutions_differ() is products
    finally:
        torch.backends.cudnn.allow_tf32 = before


def test_gemmnorms_own_switch(monkeypatch):
    with gemmnorm.set_float32_arithmetic("ieee"):
        assert arithmetic(torch.float32) == "ieee" and arithmetic(torch.bfloat16) == "native"
        assert 'set_float32_arithmetic("ieee")' in float32_reason()
        with gemmnorm.set_float32_arithmetic("float32"):
            assert arithmetic(torch.float32) == "float32"
        MATMUL.allow_tf32 = True
        assert arithmetic(torch.float32) == "tf32" and "TF32" in float32_reason()
        MATMUL.allow_tf32 = False
    assert arithmetic(torch.float32) == "float32" and "do not allow TF32" in float32_reason()
    monkeypatch.setenv("GEMMNORM_FLOAT32", "ieee")
    assert arithmetic(torch.float32) == "ieee" and "GEMMNORM_FLOAT32=ieee" in float32_reason()
    with gemmnorm.set_float32_arithmetic("float32"):
        assert arithmetic(torch.float32) == "float32"
    gemmnorm.set_float32_arithmetic("float32")
    assert arithmetic(torch.float32) == "float32"
    gemmnorm.set_float32_arithmetic(None)
    assert arithmetic(torch.float32) == "ieee"


def test_an_unknown_name_is_refused(monkeypatch):
    with pytest.raises(GemmNormValueError, match="arithmetic: expected None or one of float32, ieee; got 'tf32'"):
        gemmnorm.set_float32_arithmetic("tf32")
    monkeypatch.setenv("GEMMNORM_FLOAT32", "exact")
    with pytest.raises(GemmNormValueError, match="GEMMNORM_FLOAT32: expected"):
        arithmetic(torch.float32)


def test_doctor_says_which_and_why(monkeypatch):
    monkeypatch.setattr(doctor, "chip_of", lambda device: plan.chip_for(90))
    assert doctor.what_runs()[-1] == float32_reason()
