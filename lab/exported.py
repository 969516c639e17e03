"""Exported files beside the package: PYTHONPATH=src python lab/exported.py [--build] FILE …, on a GPU.

Microseconds of a call in training and in evaluation, with the defaults of the file's precision, and whether the output
passes a plain allclose with eager at 1e-4. `--build` compiles only.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from device_check import Timer

import gemmnorm


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    timer = Timer()
    for path in (a for a in sys.argv[1:] if not a.startswith("-")):
        module = load(path)
        arguments = module.get_init_inputs()
        torch.manual_seed(0)
        new = module.ModelNew(*arguments).cuda()
        x = module.get_inputs()[0].cuda()
        with torch.no_grad():
            new(x)
        if "--build" in sys.argv:
            continue
        eager = module.Model(*arguments).cuda()
        eager.load_state_dict(new.state_dict())
        package = gemmnorm.fuse(module.Model(*arguments).cuda())
        package.load_state_dict(new.state_dict())
        for training in (True, False):
            for model in (new, eager, package):
                model.train(training)
            with torch.no_grad():
                close = torch.allclose(new(x), eager(x), 1e-4, 1e-4)
                models = {"eager": eager, "package": package, "exported": new}
                times = timer({name: lambda m=m: m(x) for name, m in models.items()}, 9)  # noqa: B023
            print(
                f"{Path(path).stem:24} {'train' if training else 'eval '}",
                *(f"{name} {ms * 1e3:8.1f}" for name, ms in times.items()),
                f"exported / package {times['exported'] / times['package']:.3f}",
                "allclose at 1e-4" if close else "NOT close at 1e-4",
                flush=True,
            )


if __name__ == "__main__":
    main()
