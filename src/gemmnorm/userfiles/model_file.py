"""Load a problem file: a Python file that defines `Model`, `get_inputs` and `get_init_inputs`.

::

    class Model(nn.Module): ...          # a candidate file defines ModelNew instead (Model serves if it is alone)
    def get_inputs(): return [x, ...]    # the tensors forward takes; drawn fresh on every call
    def get_init_inputs(): return [...]  # the constructor's positional arguments (a dict: its keyword arguments)

The source is executed as a module of its own, registered in `sys.modules` and `linecache`: so
`load_inline`, pickling, `inspect.getsource` and tracebacks work, and so does a file written for harnesses that
execute the text without a `__file__`. User code runs in *this* process; call these functions from inside
`gemmnorm.userfiles.run_isolated`.

A `precision` ("fp32", "fp16", "bf16") does what KernelBench's does: the model is constructed as it is and then cast
(parameters and floating-point buffers), and so is every tensor that the two functions return, one of integers too.
"""

from __future__ import annotations

import hashlib
import linecache
import random
import re
import sys
import tokenize
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import GemmNormError

__all__ = ["PRECISIONS", "ModelFile", "ModelFileError", "load_candidate_file", "load_model_file", "load_source"]

_OTHERS = 86_753_094  # no seed that a file sets by itself: its doing so shows

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ModelFileError(GemmNormError, ValueError):
    """A problem file is missing, cannot be executed, or does not define what it must."""


@dataclass(frozen=True)
class ModelFile:
    """One executed problem file.

    name         how messages call it: the path as given
    module       the module object, also in `sys.modules` under `module.__name__`
    model_class  `Model`, or `ModelNew` of a candidate
    class_name   which of the two it was
    precision    of `PRECISIONS`: what model and inputs are cast to; None: they stay as they are
    """

    name: str
    module: types.ModuleType
    model_class: type[nn.Module]
    class_name: str
    precision: str | None = None

    @property
    def has_inputs(self) -> bool:
        return hasattr(self.module, "get_inputs") and hasattr(self.module, "get_init_inputs")

    def init_inputs(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the constructor."""
        _seed(0)
        value = self._call("get_init_inputs")
        if isinstance(value, dict):
            return [], {name: self._cast(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._cast(item) for item in value], {}
        raise ModelFileError(
            f"{self.name}: get_init_inputs() must return a list of constructor arguments, got {_kind(value)}"
        )

    def inputs(self, seed: int) -> list[Any]:
        """A fresh draw of forward's arguments."""
        _seed(seed)
        value = self._call("get_inputs")
        if not isinstance(value, (list, tuple)):
            raise ModelFileError(f"{self.name}: get_inputs() must return a list of inputs, got {_kind(value)}")
        if not any(isinstance(item, torch.Tensor) for item in value):
            kinds = ", ".join(sorted({_kind(item) for item in value})) or "nothing"
            raise ModelFileError(f"{self.name}: get_inputs() must return a list with a tensor in it, got {kinds}")
        return [self._cast(item) for item in value]

    def build(self, seed: int, arguments: tuple[list[Any], dict[str, Any]] | None = None) -> nn.Module:
        """Construct the model right after seeding, as harnesses that match weights by the seed do."""
        positional, keyword = self.init_inputs() if arguments is None else arguments
        _seed(seed)
        try:
            model = self.model_class(*positional, **keyword)
            return model.to(PRECISIONS[self.precision]) if self.precision else model
        except (Exception, SystemExit) as error:
            raise ModelFileError(
                f"{self.name}: {self.class_name}(*get_init_inputs()) must build the model, "
                f"it raised {_first_line(error)}{_where(error, self.module)}"
            ) from error

    def build_whole(self, seed: int, arguments: tuple[list[Any], dict[str, Any]] | None = None) -> nn.Module:
        """`build`, for who needs every parameter: a lazy module's have no shape before its first call."""
        model = self.build(seed, arguments)
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise ModelFileError(
                    f"{self.name}: {self.class_name} must have tensors in its state_dict, "
                    f"{name} is {_kind(value)} (of get_extra_state)"
                )
            if is_lazy(value):
                raise ModelFileError(
                    f"{self.name}: {self.class_name} must have its parameters once it is built, {name} waits for the "
                    "first call (a lazy module); give the module its sizes"
                )
        return model

    def run_once(self) -> None:
        """Build the model and run it, to know whether it runs at all."""
        model, inputs = self.build(0), self.inputs(0)
        try:
            with torch.no_grad():
                model(*inputs)
        except (Exception, SystemExit) as error:
            raise ModelFileError(
                f"{self.name}: forward(*get_inputs()) raised {_first_line(error)}{_where(error, self.module)}"
            ) from error

    def _cast(self, value: Any) -> Any:
        return value.to(PRECISIONS[self.precision]) if self.precision and isinstance(value, torch.Tensor) else value

    def _call(self, function_name: str) -> Any:
        function = _required(self.module, function_name, self.name)
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise ModelFileError(
                f"{self.name}: {function_name}() must return the inputs, it raised {_first_line(error)}"
                f"{_where(error, self.module)}"
            ) from error


def _seed(seed: int) -> None:
    """Every generator that a constructor or `get_inputs()` may draw from; PyTorch's as harnesses do."""
    torch.manual_seed(seed)
    random.seed(_OTHERS + seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(_OTHERS + seed)


def load_model_file(path: str | Path, precision: str | None = None) -> ModelFile:
    """Execute a problem file and check that `Model`, `get_inputs` and `get_init_inputs` are there."""
    module = _execute_file(path)
    model_class = _model_class(module, "Model", str(path))
    for function_name in ("get_inputs", "get_init_inputs"):
        _required(module, function_name, str(path))
    return ModelFile(str(path), module, model_class, "Model", precision)


def load_candidate_file(path: str | Path, precision: str | None = None) -> ModelFile:
    """Execute a replacement's file: `ModelNew`, or `Model` where only that is defined."""
    module = _execute_file(path)
    class_name = "ModelNew" if hasattr(module, "ModelNew") or not hasattr(module, "Model") else "Model"
    return ModelFile(str(path), module, _model_class(module, class_name, str(path)), class_name, precision)


def load_source(source: str, name: str, *, file: str | None = None) -> types.ModuleType:
    """Execute `source` as a module called after `name`; without `file` the module has no `__file__`."""
    digest = hashlib.sha256(f"{file or name}\0{source}".encode(errors="surrogateescape")).hexdigest()[:12]
    stem = re.sub(r"\W", "_", Path(name).stem) or "source"
    module = types.ModuleType(f"user_{stem}_{digest}")
    shown = file or f"<{name}>"
    if file is not None:
        module.__file__ = file
    linecache.cache[shown] = (len(source), None, source.splitlines(keepends=True), shown)
    try:
        code = compile(source, shown, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        what = _first_line(error)
        if isinstance(error, SyntaxError) and error.lineno:
            what = f"{type(error).__name__}: {error.msg}, line {error.lineno}"
        raise ModelFileError(f"{name}: must be Python source, got {what}") from error
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise ModelFileError(
            f"{name}: must run when imported, it raised {_first_line(error)}{_where(error, module)}"
        ) from error
    return module


def _execute_file(path: str | Path) -> types.ModuleType:
    file = Path(path)
    try:
        if not file.is_file():
            found = "a directory" if file.is_dir() else "no such file"
            raise ModelFileError(f"{path}: expected a Python file that defines the model, found {found}")
        with tokenize.open(str(file)) as stream:
            source = stream.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: must be readable Python source, got {_first_line(error)}") from error
    folder = str(file.resolve().parent)
    if folder not in sys.path:  # last, so that nothing beside the model hides a module of Python's or of ours
        sys.path.append(folder)
    return load_source(source, str(path), file=str(file.resolve()))


def _model_class(module: types.ModuleType, class_name: str, name: str) -> type[nn.Module]:
    value = _required(module, class_name, name)
    if not (isinstance(value, type) and issubclass(value, nn.Module)):
        raise ModelFileError(f"{name}: {class_name} must be a torch.nn.Module class, got {_kind(value)}")
    return value


def _required(module: types.ModuleType, attribute: str, name: str) -> Callable[..., Any]:
    value = getattr(module, attribute, None)
    if value is None:
        defined = sorted(key for key, item in vars(module).items() if callable(item) and not key.startswith("_"))
        listed = ", ".join(defined[:12]) or "nothing callable"
        raise ModelFileError(f"{name}: must define {attribute}, it defines {listed}")
    if not callable(value):
        raise ModelFileError(f"{name}: {attribute} must be callable, got {_kind(value)}")
    return value  # type: ignore[no-any-return]


def _where(error: BaseException, module: types.ModuleType) -> str:
    """The deepest line of the user's own file in a traceback, for the message."""
    shown = getattr(module, "__file__", None) or ""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == shown or f.filename.startswith("<")]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames and frames[-1].line else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
