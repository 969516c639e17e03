"""Writing a model file's replacement: MODEL.py → one file with `class ModelNew(Model)` and its CUDA kernels.

Read in this order:

- `model_new.py`  the way of an export: load the model, find its chains, choose a strategy, write the file
- `batches.py`    which plans the file needs, so that it serves every batch size
- `host.py`       the plans printed as C++ host functions
- `kernels.py`    the kernels that they launch, as CUDA text; what the plans say of the sources
- `prune.py`      the sources less what these kernels never reach
- `fold.py`       branches that all kernels of a file decide alike
- `method.py`     the comment on method and accuracy, with the measured figures
- `generated.py`  the Python around the CUDA text, and the class `ModelNew`
- `hub.py`        the same as a project for Hugging Face's kernel-builder
- `nvcc.py`       does the CUDA text of a written file compile?
- `__main__.py`   `python -m gemmnorm.export examples` writes the committed examples anew
"""

from .hub import check_hub_folder, hub_files, imports_beside, write_hub
from .method import MARK
from .model_new import EXAMPLES, REFUSED, ExportResult, export, read_model, regenerate, write_replacement
from .nvcc import compile_check

__all__ = [
    "EXAMPLES",
    "MARK",
    "REFUSED",
    "ExportResult",
    "check_hub_folder",
    "compile_check",
    "export",
    "hub_files",
    "imports_beside",
    "read_model",
    "regenerate",
    "write_hub",
    "write_replacement",
]
