"""The fused chain as a module, with the children and the state_dict keys of the chain that it replaces."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from . import activations, plan
from .chain import ChainCall
from .errors import GemmNormRuntimeError, GemmNormTypeError, GemmNormValueError
from .functional import check_process_group


class LinearScaleBatchNorm1d(nn.Module):
    """φ(BatchNorm1d(Linear(x) · scale)) in one call.

        y = φ(γ·((x Wᵀ + b)·s − mean) / √(var + eps) + β)

    The children are ordinary modules, `gemm` (`nn.Linear`) and `bn` (`nn.BatchNorm1d`), and `scale` is a parameter;
    they are drawn in the order weight, bias, scale (from a normal distribution), so that one seed and one `state_dict`
    serve this module and the chain written out. Whatever is done to the children (hooks, parametrizations, adapters)
    counts: they are then called one by one. Converted to SyncBatchNorm, `bn` has synchronised statistics.

    Args:
        in_features: I.
        out_features: O.
        bias: the Linear has a bias [O]. In training its gradient is exactly 0, where PyTorch's has rounding noise.
        scale: True for a parameter [O], a shape ((O,), (1, O), (1,) or ()) for one of that shape, False or None for
            none.
        eps: added to the variance.
        momentum: weight of the new statistics in the running ones; None averages over all batches so far.
        affine: γ and β [O] are parameters, as in `nn.BatchNorm1d`.
        track_running_stats: keep running statistics [O], as in `nn.BatchNorm1d`.
        activation: None, a name of `gemmnorm.activations`, e.g. `"relu"`, or a module of that kind, e.g. `nn.ReLU()`.
        process_group: synchronise the statistics over this `torch.distributed` group. Copies share the group.
        keep_product: "auto", True or False, as in `linear_scale_batch_norm`.
        device: of parameters and buffers.
        dtype: of parameters and buffers: float32, bfloat16, float16 or float64.
        bn_bias: the BatchNorm1d has a bias β [O], where it is affine.

    Shape: x [B, I] → y [B, O]. Anything but two dimensions runs the original ops.

    Raises:
        GemmNormValueError: `scale` or `activation` is none of those above.

    Examples:
        >>> m = gemmnorm.LinearScaleBatchNorm1d(128, 256, bias=False, scale=False, activation="relu")
        >>> m(torch.randn(32, 128)).shape
        torch.Size([32, 256])
    """

    scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scale: bool | tuple[int, ...] | None = True,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str | nn.Module | None = None,
        process_group: Any | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bn_bias: bool = True,
        keep_product: bool | str = "auto",
    ) -> None:
        super().__init__()
        self.activation = _activation(activation)
        shape = _scale_shape(scale, out_features)
        self.gemm = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        drawn = None if shape is None else nn.Parameter(torch.randn(shape, device=device, dtype=dtype))
        self.register_parameter("scale", drawn)
        self.bn: nn.BatchNorm1d | nn.SyncBatchNorm = nn.BatchNorm1d(
            out_features,
            eps=eps,
            momentum=momentum,
            affine=affine,
            track_running_stats=track_running_stats,
            device=device,
            dtype=dtype,
        )
        if not bn_bias:
            self.bn.register_parameter("bias", None)
        check_process_group(process_group)
        self.process_group = process_group
        plan.parse_keep_product(keep_product)  # refused here rather than in a step
        self.keep_product = keep_product
        self._call = ChainCall()

    @classmethod
    def from_modules(
        cls,
        linear: nn.Linear,
        bn: nn.BatchNorm1d | nn.SyncBatchNorm,
        scale: nn.Parameter | None = None,
        activation: str | nn.Module | None = None,
    ) -> LinearScaleBatchNorm1d:
        """The module over existing children: the same parameters, buffers and hooks, nothing is copied.

        Args:
            linear: becomes `gemm`.
            bn: becomes `bn`. A SyncBatchNorm with a process group becomes a BatchNorm1d over the same tensors, with
                that group; one without stays, and synchronises over all ranks.
            scale: a parameter [O], [1, O], [1] or [], or None.
            activation: as in the constructor.

        Raises:
            GemmNormTypeError: `linear`, `bn` or `scale` is of another class.
            GemmNormValueError: the sizes differ, or `scale` or `activation` is none of those above.

        Examples:
            >>> head = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU())
            >>> m = gemmnorm.LinearScaleBatchNorm1d.from_modules(head[0], head[1], activation=head[2])
        """
        if not isinstance(linear, nn.Linear):
            raise GemmNormTypeError(f"linear: expected an nn.Linear; got {type(linear).__name__}")
        if not isinstance(bn, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            raise GemmNormTypeError(f"bn: expected an nn.BatchNorm1d or nn.SyncBatchNorm; got {type(bn).__name__}")
        if linear.out_features != bn.num_features:
            raise GemmNormValueError(
                f"bn: expected {linear.out_features} features, as linear gives; got {bn.num_features}"
            )
        if scale is not None:
            if not isinstance(scale, nn.Parameter):
                raise GemmNormTypeError(f"scale: expected an nn.Parameter or None; got {type(scale).__name__}")
            _scale_shape(tuple(scale.shape), linear.out_features)
        self = cls(1, 1, scale=False, activation=activation, device="meta")
        self.gemm, self.scale = linear, scale
        self.bn = bn
        if isinstance(bn, nn.SyncBatchNorm) and bn.process_group is not None:
            self.process_group, self.bn = bn.process_group, _with_tensors_of(bn)
        self.training = bn.training  # and the children keep their modes
        return self

    def to_modules(self) -> nn.Sequential | PlainChain:
        """The chain as plain modules over the same parameters and buffers, under the same names: `gemm`, `bn` (a
        SyncBatchNorm where there is a process group) and `activation`; an `nn.Sequential`, or where there is a `scale`,
        which no module of PyTorch's holds, a `PlainChain`. `fuse` finds the chain in either.

        Examples:
            >>> plain = gemmnorm.LinearScaleBatchNorm1d(128, 256).to_modules()
            >>> type(plain.gemm), plain.scale.shape
            (<class 'torch.nn.modules.linear.Linear'>, torch.Size([256]))
        """
        group = self.process_group
        bn = self.bn if group is None else nn.SyncBatchNorm.convert_sync_batchnorm(self.bn, group)
        activation = None if self.activation is None else activations.to_module(self.activation).train(self.training)
        found: nn.Sequential | PlainChain = nn.Sequential()
        if self.scale is not None:
            found = PlainChain(self.gemm, self.scale, bn, activation)
        else:
            for name, child in (("gemm", self.gemm), ("bn", bn), ("activation", activation)):
                if child is not None:
                    found.add_module(name, child)
        found.training = self.training  # and the children keep their modes
        return found

    @property
    def in_features(self) -> int:
        """I, of `gemm`."""
        return self.gemm.in_features

    @property
    def out_features(self) -> int:
        """O, of `gemm`."""
        return self.gemm.out_features

    def reset_parameters(self) -> None:
        """Draw weight, bias and scale again, in the constructor's order, and reset `bn`."""
        self.gemm.reset_parameters()
        if self.scale is not None:
            nn.init.normal_(self.scale)
        if self.bn.bias is None and self.bn.affine:  # PyTorch's own, before 2.13, wants both
            self.bn.reset_running_stats()
            nn.init.ones_(self.bn.weight)
        else:
            self.bn.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """y [B, O] for x [B, I]."""
        gemm, bn, scale = self._parts()
        return self._call(
            input,
            gemm,
            bn,
            scale=scale,
            activation=self.activation,
            process_group=self.process_group,
            keep_product=self.keep_product,
        )

    def _parts(self) -> tuple[Any, Any, Tensor | None]:
        """`gemm`, `bn` and `scale`, from where modules keep them, as `chain.tensors_of` does and why."""
        if not torch.compiler.is_compiling():
            try:
                modules = self._modules
                return modules["gemm"], modules["bn"], self._parameters["scale"]
            except (AttributeError, KeyError):  # docs/private_api.md
                pass
        return self.gemm, self.bn, self.scale

    def extra_repr(self) -> str:
        parts = [] if self.scale is None else [f"scale={tuple(self.scale.shape)}"]
        parts += [] if self.activation is None else [f"activation={self.activation}"]
        parts += [] if self.process_group is None else [f"process_group={self.process_group}"]
        return ", ".join(parts)

    def __prepare_scriptable__(self) -> Any:
        """`torch.jit.script` asks for what it is to read; putting plain modules there would change the model."""
        raise GemmNormRuntimeError(
            "torch.jit.script: expected modules whose source is TorchScript; got a LinearScaleBatchNorm1d. Script"
            " module.to_modules(), or take torch.jit.trace or torch.export, which see the plain operations"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearScaleBatchNorm1d:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group  # a group can only be shared
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class PlainChain(nn.Module):
    """activation(bn(gemm(x) · scale)), module by module: what `LinearScaleBatchNorm1d.to_modules` gives.

    Args:
        gemm: [B, I] → [B, O].
        scale: [O], [1, O], [1] or [].
        bn: of O features.
        activation: None for none.

    Shape: x [B, I] → y [B, O].
    """

    def __init__(self, gemm: nn.Linear, scale: nn.Parameter, bn: nn.Module, activation: nn.Module | None) -> None:
        super().__init__()
        self.gemm, self.scale, self.bn, self.activation = gemm, scale, bn, activation

    def forward(self, input: Tensor) -> Tensor:
        """y [B, O] for x [B, I]."""
        y: Tensor = self.bn(self.gemm(input) * self.scale)
        return y if self.activation is None else self.activation(y)


def _scale_shape(scale: Any, out_features: int) -> tuple[int, ...] | None:
    if scale is None or scale is False:
        return None
    shapes = ((out_features,), (1, out_features), (1,), ())
    shape = (out_features,) if scale is True else scale
    sizes = isinstance(shape, (tuple, list)) and all(isinstance(size, int) for size in shape)
    if not sizes or tuple(shape) not in shapes:
        listed = ", ".join(map(str, shapes))
        raise GemmNormValueError(f"scale: expected True, False, None or a shape of {listed}; got {scale!r}")
    return tuple(shape)


def _activation(activation: Any) -> str | None:
    if not isinstance(activation, nn.Module):
        return activations.canonical(activation)
    name = activations.from_module(activation)
    if name is None:
        known = ", ".join(dict.fromkeys((*(row.module.__name__ for row in activations.TABLE), "ReLU6")))
        raise GemmNormValueError(f"activation: expected one of nn.{known}; got {type(activation).__name__}")
    return name


def _with_tensors_of(norm: nn.SyncBatchNorm) -> nn.BatchNorm1d:
    """A BatchNorm1d over the tensors of a SyncBatchNorm, with its settings, hooks and mode."""
    bn = nn.BatchNorm1d(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device="meta"
    )
    bn._parameters.update(norm._parameters)
    bn._buffers.update(norm._buffers)
    bn.__dict__.update({name: value for name, value in vars(norm).items() if "hook" in name})
    return bn.train(norm.training)
