"""Linear → scale → BatchNorm (→ activation) in PyTorch, at the price of the Linear alone."""

import signal as _signal
import sys as _sys

# The command, before PyTorch is imported, has nothing to clean up: an interruption ends it, without a traceback.
if (_sys.argv[0] == "-m" and "gemmnorm" in _sys.orig_argv) or _sys.argv[0].endswith(("/gemmnorm", "gemmnorm.exe")):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from .errors import GemmNormError
from .functional import linear_scale_batch_norm, set_fusion
from .fuse import explain, fuse, fuse_report, prepare, unfuse, unprepare, warmup
from .module import LinearScaleBatchNorm1d
from .plan import set_keep_product, set_strategy
from .runtime.arithmetic import set_float32_arithmetic

__version__ = "0.1.0"
__all__ = [
    "GemmNormError",
    "LinearScaleBatchNorm1d",
    "explain",
    "fuse",
    "fuse_report",
    "linear_scale_batch_norm",
    "prepare",
    "set_float32_arithmetic",
    "set_fusion",
    "set_keep_product",
    "set_strategy",
    "unfuse",
    "unprepare",
    "warmup",
]
