"""Which cases run for a model on a device, seed by seed, and the references that candidates are judged by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ..userfiles import ModelFile, ModelFileError
from .families import FAMILIES, QUICK, Case, draw_inputs, plan_cases, without_rows
from .golden import Original, Reference
from .outputs import take_apart
from .trial import AUTOCAST_FP16, AUTOCASTS, STATISTICS, frozen, run_trial

_LARGE = 4_000_000  # parameters from which on the families are shared out over the seeds
_SMALL_FLOPS = 2.0e8  # of a forward: below, several CPU threads bring nothing, and cost a lot on a busy machine
_CPU_FLOPS_PER_CORE = 5.0e10  # float64, one core

Effort = Literal["quick", "usual", "thorough"]
SEEDS: dict[Effort, int] = {"quick": 1, "usual": 3, "thorough": 5}
_FULL_SIZE_SECONDS: dict[Effort, float] = {"quick": 10.0, "usual": 60.0, "thorough": 300.0}  # of its float64 products


class Schedule:
    """Which cases run for this model on this device, and the references of them, seed by seed.

    threads  how many of the CPU's are worth having for a model of this size
    effort   "quick": the families that an edit breaks first.  "usual": all; of large models each under one seed.
             "thorough": all under every seed, and limits from all noisy runs
    """

    def __init__(self, file: ModelFile, seeds: int, device: str | torch.device, effort: Effort = "usual") -> None:
        self.file, self.seeds, self.device = file, seeds, torch.device(device)
        self.skipped: list[str] = []
        self.effort: Effort = effort
        self._first = self._original(0)
        small = self._first.accepts_rows(2, 5, 33)
        for phase in ("training", "evaluation"):
            if self._first.draws_random_numbers(9 if small else None, phase == "training"):
                raise ModelFileError(
                    f"{file.name}: Model must compute the same outputs from the same inputs, "
                    f"in {phase} it draws random numbers (not by dropout), so that nothing can be compared"
                )
        shared = self._first.size >= _LARGE and effort == "usual"
        on_gpu = self.device.type == "cuda"
        few = self._flops() * (self._first.rows or 1) < _SMALL_FLOPS
        self.threads = 1 if few else torch.get_num_threads()
        rows = None if on_gpu or not small else self._full_rows()
        families = [c for c in FAMILIES if effort != "quick" or c.name in QUICK]
        idle = set() if "mean" in self._first.role_of.values() else {STATISTICS}  # uses that mean nothing here
        idle |= set() if self._first.dtypes == {torch.float32} else {*AUTOCASTS}
        idle |= set() if on_gpu or few else {AUTOCAST_FP16}  # a CPU is slow at products of float16
        families = [c for c in families if not idle & {*c.use}]
        everywhere = on_gpu or effort == "thorough"
        options = {"shared": shared, "full_rows": rows, "full_everywhere": everywhere, "families": families}
        self.cases = [plan_cases(i, seeds, **options) for i in range(seeds)]  # type: ignore[arg-type]
        if not small:
            self.skipped.append("other batch sizes: the model runs only at the batch that get_inputs() makes")
            self.cases = [without_rows(cases) for cases in self.cases]
        if shared and seeds < 3:
            self.skipped.append(f"nothing by family, but with {seeds} seed(s) a large model sees each family once only")
        if any(not isinstance(v, Tensor) and take_apart(v).tensors for v in self._first.inputs):
            self.skipped.append("tensors inside of containers in the inputs: their gradients, other values and layouts")
        self.total = sum(len(case.phases) for cases in self.cases for case in cases)

    def references(self) -> Iterator[Reference]:
        for seed, cases in enumerate(self.cases):
            original = self._first if seed == 0 else self._original(seed)
            try:
                yield from original.references(cases)
            finally:
                self.skipped += original.skipped

    def _original(self, seed: int) -> Original:
        return Original(self.file, seed, self.device, thorough=self.effort == "thorough")

    def _flops(self) -> float:
        """Of one row forward."""
        rows = 2 if self._first.accepts_rows(2) else None
        inputs = draw_inputs(self._first.inputs, Case("probe", rows), torch.Generator().manual_seed(0))
        model = self._first.model
        # PyTorch 2.4 counts no model that returns a parameter which wants a gradient, where gradients are off.
        with frozen(model.parameters()), FlopCounterMode(display=False) as counter:
            run_trial(model, inputs, training=False, cotangent=None)
        return float(counter.get_total_flops()) / (rows or self._first.rows or 1)

    def _full_rows(self) -> int | None:
        """The batch of the full-size case on a CPU: all of it, or as much as the float64 products have time for."""
        full = self._first.rows
        if full is None:
            return None
        # Training runs forward and backward (three products for each one), evaluation forward; golden and noisy.
        seconds = self._flops() * full * 8 / (_CPU_FLOPS_PER_CORE * max(1, torch.get_num_threads()))
        allowed = _FULL_SIZE_SECONDS[self.effort]
        if seconds <= allowed:
            return full
        rows = max(2, int(full * allowed / seconds))
        self.skipped.append(f"rows {rows} to {full} of the full-size case: float64 on this CPU takes {seconds:.0f} s")
        return rows


def references(
    file: ModelFile, *, seeds: int = 3, device: str = "cpu", effort: Effort = "usual"
) -> Iterator[Reference]:
    """Every reference of a model, to be judged against one at a time or kept for several candidates."""
    return Schedule(file, seeds, device, effort).references()
