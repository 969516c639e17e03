"""`python -m gemmnorm.export examples` writes examples/model_new anew, after a change to kernels or exporter."""

from __future__ import annotations

import sys

from .model_new import regenerate

for path in regenerate(sys.argv[1] if len(sys.argv) > 1 else "examples"):
    print(f"{len(path.read_text(encoding='utf-8').splitlines()):6} lines  {path}")
