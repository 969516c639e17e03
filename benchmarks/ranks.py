#!/usr/bin/env python3
"""Synchronised statistics on several GPUs of one host: right, and how long, against `nn.SyncBatchNorm`.

    PYTHONPATH=src torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --json h100-x2.json

Each rank has the batch that a case names. First every precision is compared with one process that has all rows
(float64) and with SyncBatchNorm's own error, on even, uneven and empty ranks; then each case is timed. `ms` is device
time (the L2 flushed, the ranks lined up on the device before each sample), `wall_ms` the time of a call among 60 in a
row, host and all, `graph_ms` that of a CUDA graph's replay. The file is written after every part, so that a run cut
short leaves what it had. On a CPU, with gloo, sizes are small and times mean little.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gemmnorm import LinearScaleBatchNorm1d
from gemmnorm.bench.cases import CASES, Case, tf32
from gemmnorm.bench.documents import new_document, write_json
from gemmnorm.bench.environment import environment
from gemmnorm.bench.timing import CudaClock, reason
from gemmnorm.op.sync import Group, check_agreement
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import peers
from gemmnorm.runtime import ranks as runtime_ranks
from gemmnorm.runtime.operands import Operands, Options
from gemmnorm.runtime.sources import source_hash

CHECK = Case("check", 256, 256, 512)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the others have float32 parameters
PRECISIONS = ("bf16", "tf32", "fp32", "amp", "fp16")
CALLS = 60  # in a row, for the wall clock
SAMPLES = 15


class Chain(nn.Module):
    """The chain written out, with SyncBatchNorm."""

    def __init__(self, ours: LinearScaleBatchNorm1d) -> None:
        super().__init__()
        self.gemm = copy.deepcopy(ours.gemm)
        self.scale = copy.deepcopy(ours.scale)
        self.bn = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(ours.bn))
        self.activation = nn.ReLU() if ours.activation else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = self.gemm(x)
        return self.activation(self.bn(z if self.scale is None else z * self.scale))


def built(case: Case, device: torch.device, dtype: torch.dtype) -> LinearScaleBatchNorm1d:
    """Ours, the same on every rank."""
    torch.manual_seed(0)
    scale = (case.out_features,) if case.scale else False
    module = LinearScaleBatchNorm1d(
        case.in_features, case.out_features, bias=case.bias, scale=scale, activation=case.activation,
        process_group=dist.group.WORLD,
    )  # fmt: skip
    return module.to(device, dtype)


def alone(module: LinearScaleBatchNorm1d) -> LinearScaleBatchNorm1d:
    """A copy without a process group."""
    module = copy.deepcopy(module)
    module.process_group = None
    return module


def tell(*words: object) -> None:
    if dist.get_rank() == 0:
        print(f"{time.perf_counter() - BEGUN:6.1f} s ", *words, flush=True)


# --- compiling ahead --------------------------------------------------------------------------------------------------


def prepare(precision: str, case: Case, save: bool, ranks: int) -> None:
    """Compile what such calls will need into the disk cache: synchronised, and for cases that are timed alone too."""
    device = torch.device("cuda", 0)
    with tf32(precision == "tf32"):
        dtype = DTYPES.get(precision, torch.float32)
        weight = torch.empty(case.out_features, case.in_features, device=device, dtype=dtype).requires_grad_()
        vector = torch.ones(case.out_features, device=device, dtype=dtype)
        x = torch.empty(case.batch, case.in_features, device=device, dtype=dtype)
        operands = Operands(
            x, weight, vector if case.bias else None, vector if case.scale else None, vector, vector,
            torch.zeros((), dtype=torch.int64, device=device), vector, vector,
        )  # fmt: skip
        options = Options(activation=case.activation, save=save)
        multiplied = operands
        if precision == "amp":
            multiplied = operands._replace(x=x.bfloat16(), weight=weight.bfloat16())
        runtime_ranks.find(multiplied, options, ranks, (dtype, dtype))
        if case.name == CHECK.name or precision != "bf16":
            return
        call = runtime.find(operands, options, "eager")
        if save and call is not None:
            with torch.no_grad():
                _, kept, _ = call.forward(operands)
                grad = x.new_zeros(case.batch, case.out_features)
                call.backward([True] * 6, grad, [*operands.differentiable, *kept])


def compile_ahead(names: tuple[str, ...], ranks: int) -> None:
    """In processes beside each other, because a kernel takes seconds."""
    work = [("bf16", CASES[name], save) for name in names for save in (True, False)]
    work += [(p, replace(CHECK, batch=n), True) for p in PRECISIONS for n in (200, 96, 130, 64, 1)]
    work.append(("amp", CASES[names[0]], True))
    spawn = multiprocessing.get_context("spawn")
    workers = max(1, min(len(work), (os.cpu_count() or 2) - 2))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for job in [pool.submit(prepare, *item, ranks) for item in work]:
            if job.exception() is not None:
                print("not compiled ahead:", job.exception(), flush=True)


# --- is it right? -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def arithmetic(precision: str) -> Iterator[torch.dtype]:
    """TF32 and autocast as `precision` has it; the model's dtype."""
    amp = torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16, enabled=precision == "amp")
    with tf32(precision == "tf32"), amp:
        yield DTYPES.get(precision, torch.float32)


def one_step(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """This rank's y and grad x, the parameters' gradients summed over ranks, the running statistics."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = call(x)
    y.backward(grad.to(y.dtype))
    assert x.grad is not None
    found = {"y": y.detach(), "grad x": x.grad}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        whole = p.grad.double()
        dist.all_reduce(whole)
        found[f"grad {name}"] = whole
    return found | {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()}


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor], rows: slice) -> dict[str, float]:
    """Relative errors; of gradients that all but cancel (the bias's, the scale's) relative to those of β and γ."""
    errors = {}
    for name, want in exact.items():
        want = want[rows] if name in ("y", "grad x") else want
        like = {"grad gemm.bias": "grad bn.bias", "grad scale": "grad bn.weight"}.get(name, name)
        size = max(float(want.norm()), float(exact[like].norm()) if like != name else 0.0, 1e-30)
        errors[name] = float((found[name].double().reshape(want.shape) - want).norm()) / size if want.numel() else 0.0
    return errors


def check(device: torch.device, precision: str, counts: list[int], compiled: bool = False) -> dict[str, Any]:
    """One case against one process with all rows; same bits on all ranks and in a second call."""
    rank = dist.get_rank()
    case = replace(CHECK, batch=sum(counts))
    with arithmetic(precision) as dtype:
        ours = built(case, device, dtype)
        theirs = Chain(ours)
        generator = torch.Generator(device).manual_seed(5)
        every = torch.randn(sum(counts), case.in_features, device=device, generator=generator).to(dtype)
        grads = torch.randn(sum(counts), case.out_features, device=device, generator=generator).to(dtype)
        begin = sum(counts[:rank])
        rows = slice(begin, begin + counts[rank])
        again = copy.deepcopy(ours)
        whole = alone(ours).double()
        with torch.autocast(device.type, enabled=False):
            x = every.double().requires_grad_()
            y = whole(x)
            y.backward(grads.double())
        exact = {"y": y.detach(), "grad x": x.grad}
        exact |= {f"grad {name}": p.grad for name, p in whole.named_parameters()}
        exact |= {name: b for name, b in whole.named_buffers() if b.is_floating_point()}
        call = torch.compile(ours, fullgraph=True, dynamic=False) if compiled else ours
        with runtime.recording() as plans:
            got = one_step(ours, call, every[rows], grads[rows])
        errors = worst_error(got, exact, rows)
        of_eager = {}
        if device.type == "cuda" and all(counts):  # PyTorch's raises on an empty rank in half precision
            of_eager = worst_error(one_step(theirs, theirs, every[rows], grads[rows]), exact, rows)
        repeated = one_step(again, again, every[rows], grads[rows])
        same = compiled or all(torch.equal(got[name], repeated[name]) for name in got)
        for name, b in got.items():
            if name.startswith("bn.running"):
                other = b.clone()
                dist.broadcast(other, 0)
                same = same and torch.equal(other, b)
    floor = 8 * {"bf16": 2**-9, "fp16": 2**-12, "tf32": 2**-11, "amp": 2**-9, "fp32": 2**-24 * 16}[precision]
    wrong = {n: e for n, e in errors.items() if not e <= 1.5 * of_eager.get(n, 0.0) + floor}
    strategies = [p.strategy for p in plans]
    answer = {"precision": precision, "rows": counts, "compiled": compiled, "strategy": strategies, "same_bits": same,
              "error": errors, "eager_error": of_eager, "wrong": wrong}  # fmt: skip
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    bad = [(r, a["wrong"], a["same_bits"]) for r, a in enumerate(answers) if a["wrong"] or not a["same_bits"]]
    tell("WRONG" if bad else "right", precision, counts, "compiled" if compiled else "", answers[0]["strategy"], bad)
    return {**answers[0], "right": not bad, "ranks": answers}


def check_captured(device: torch.device, counts: list[int]) -> dict[str, Any]:
    """A CUDA graph of the forward, collective included, replays a call's bits."""
    ours = built(replace(CHECK, batch=sum(counts)), device, torch.bfloat16)
    x = torch.randn(counts[dist.get_rank()], CHECK.in_features, device=device, dtype=torch.bfloat16)
    expected = ours(x)
    graph, y = captured_graph(lambda: ours(x))
    graph.replay()
    torch.cuda.synchronize()
    right = torch.tensor(torch.equal(y, expected), dtype=torch.int32, device=device)
    dist.all_reduce(right, dist.ReduceOp.MIN)
    tell("right" if right else "WRONG", "in a CUDA graph", counts)
    return {"precision": "bf16", "rows": counts, "captured": True, "right": bool(right)}


def captured_graph(run: Callable[[], Any]) -> tuple[Any, Any]:
    """`run` in a CUDA graph, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


# --- how long? --------------------------------------------------------------------------------------------------------


class Timer:
    """Wall clock, and device time where there is a device."""

    def __init__(self, device: torch.device) -> None:
        self.clock = CudaClock(device) if device.type == "cuda" else None
        self.line = torch.zeros(1, device=device)

    def synchronize(self) -> None:
        if self.clock:
            self.clock.synchronize()

    def wall_ms(self, run: Callable[[], object]) -> float:
        found = []
        for _ in range(3):
            dist.barrier()
            self.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS if self.clock else 2):
                run()
            self.synchronize()
            found.append((time.perf_counter() - begin) * 1e3 / (CALLS if self.clock else 2))
        return statistics.median(found)

    def device_ms(self, run: Callable[[], object]) -> float | None:
        """Median of samples, each behind a spin that hides the host, the L2 flush, and a collective as a start line."""
        if self.clock is None:
            return None
        found = []
        for _ in range(SAMPLES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.synchronize()
            dist.barrier()
            self.clock.spin(5.0)
            self.clock._flush.zero_()
            dist.all_reduce(self.line)
            begin.record()
            run()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return statistics.median(found)

    def graph_ms(self, run: Callable[[], object]) -> float | None:
        """Of a captured call replayed 20 times: nothing of the host is left. None where it cannot be captured."""
        if self.clock is None:
            return None
        try:
            return self._graph_ms(run)
        except RuntimeError as error:
            tell("not captured:", reason(error))
            self.synchronize()
            return None

    def _graph_ms(self, run: Callable[[], object]) -> float:
        graph, _ = captured_graph(run)
        dist.barrier()
        found = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.synchronize()
            dist.all_reduce(self.line)
            begin.record()
            for _ in range(20):
                graph.replay()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 20)
        return statistics.median(found)


def step_of(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], object]:
    def run() -> None:
        x.grad = None
        for p in module.parameters():
            p.grad = None
        call(x).backward(grad)

    return run


def variants(case: Case, device: torch.device, compiled: bool) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, what is called)."""
    ours = built(case, device, torch.bfloat16)
    if compiled:
        yield "ours_compiled_", ours, torch.compile(ours, fullgraph=True, dynamic=False)
    else:
        yield "", ours, ours
        local = alone(ours)
        yield "alone_", local, local
    if device.type == "cuda":
        eager = Chain(ours)
        yield "compile_" if compiled else "eager_", eager, torch.compile(eager, dynamic=False) if compiled else eager


def runs_of(case: Case, device: torch.device, module: nn.Module, call: Any) -> dict[str, Callable[[], object]]:
    """Phase → a call of it."""
    x = torch.randn(case.batch, case.in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(case.batch, case.out_features, device=device, dtype=torch.bfloat16)
    return {"train_fwd": torch.no_grad()(lambda: call(x)), "train_fwd_bwd": step_of(module, call, x, grad)}


def time_case(case: Case, device: torch.device, timer: Timer, compiled: bool) -> dict[str, dict[str, Any]]:
    """Phase → figures of each variant."""
    found: dict[str, dict[str, Any]] = {"train_fwd": {}, "train_fwd_bwd": {}}
    for prefix, module, call in variants(case, device, compiled):
        for phase, run in runs_of(case, device, module, call).items():
            with runtime.recording() as plans:
                run()
            if not prefix:
                found[phase]["strategy"] = plans[0].strategy if plans else "reference"
            for _ in range(3):
                run()
            device_ms, wall_ms = timer.device_ms(run), timer.wall_ms(run)
            found[phase] |= {f"{prefix}ms": device_ms, f"{prefix}wall_ms": wall_ms}
            tell(case.name, phase, prefix or "ours", device_ms, wall_ms)
    return found


def time_graphs(case: Case, device: torch.device, timer: Timer) -> dict[str, dict[str, Any]]:
    """Phase → the times of a CUDA graph's replay, ours synchronised and alone."""
    found: dict[str, dict[str, Any]] = {"train_fwd": {}, "train_fwd_bwd": {}}
    for prefix, module, call in list(variants(case, device, False))[:2]:
        for phase, run in runs_of(case, device, module, call).items():
            found[phase][f"{prefix}graph_ms"] = timer.graph_ms(run)
    tell(case.name, found)
    return found


def conditions(case: Case) -> dict[str, Any]:
    return {
        "case": case.name, "gpus": dist.get_world_size(), "batch": case.batch, "in_features": case.in_features,
        "out_features": case.out_features, "bias": case.bias, "scale": bool(case.scale), "activation": case.activation,
        "precision": "bf16", "param_dtype": "bfloat16", "autocast": False,
    }  # fmt: skip


def wrapped(case: Case, device: torch.device, timer: Timer) -> Iterator[dict[str, Any]]:
    """A step of the module in DistributedDataParallel and in FSDP2, float32 parameters, bfloat16 products."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # PyTorch 2.6

    ours = built(case, device, torch.float32)
    theirs = {"": copy.deepcopy(ours)} | ({"eager_": Chain(ours)} if device.type == "cuda" else {})
    x = torch.randn(case.batch, case.in_features, device=device)
    grad = torch.randn(case.batch, case.out_features, device=device)
    for how in ("DDP", "FSDP2"):
        row = {**conditions(case), "phase": "train_fwd_bwd", "grad": True, "wrapper": how, "param_dtype": "float32"}
        for prefix, module in copy.deepcopy(theirs).items():
            if how == "DDP":
                model: Any = nn.parallel.DistributedDataParallel(module)
                amp = torch.autocast(device.type, torch.bfloat16)
            else:
                model = fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
                amp = contextlib.nullcontext()

            def run(model: Any = model, amp: Any = amp) -> None:
                with amp:
                    y = model(x)
                y.backward(grad.to(y.dtype))

            try:
                for _ in range(3):
                    run()
            except (RuntimeError, TypeError, ValueError) as error:  # the same on every rank
                row[f"{prefix}fault"] = reason(error)
                continue
            assert module.bn.running_mean.dtype == torch.float32
            row[f"{prefix}ms"], row[f"{prefix}wall_ms"] = timer.device_ms(run), timer.wall_ms(run)
        tell(how, case.name, {k: v for k, v in row.items() if k.endswith(("ms", "fault"))})
        yield row


def collectives(device: torch.device, timer: Timer) -> Iterator[dict[str, Any]]:
    """The two exchanges by themselves, by collectives and by what serves, for the page that plans past one host."""
    group = Group(dist.group.WORLD, dist.get_world_size())
    for features in (512, 4096, 8192, 65536, 1 << 20):
        row, sums = torch.zeros(2 * features + 1, device=device), torch.zeros(2 * features, device=device)
        check_agreement(torch.empty(features, 1, device=device), group)
        ways = {"all_gather": (group.gather_by_collective, row), "all_reduce": (group.add_up_by_collective, sums)}
        if peers.find(group.handle, row):
            ways |= {"gather by launch": (group.gather, row), "sum by launch": (group.add_up, sums)}
        for name, (exchange, sent) in ways.items():
            exchange(sent)
            device_ms, wall_ms = (took(lambda e=exchange, s=sent: e(s)) for took in (timer.device_ms, timer.wall_ms))
            yield {"collective": name, "gpus": group.ranks, "features": features, "ms": device_ms, "wall_ms": wall_ms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("h100-x2.json"))
    parser.add_argument("--seconds", type=float, default=215.0, help="no case is begun after that")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    names = ("projector256", "projector", "kb39") if device.type == "cuda" else ("tiny_projector",)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if os.environ["RANK"] == "0":
            compile_ahead(names, int(os.environ["WORLD_SIZE"]))
    kind = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(**kind)  # type: ignore[arg-type]
    document = new_document(
        "ranks", command="benchmarks/two_gpus.sh", source_hash=source_hash(), environment=environment(device),
        checks=[], rows=[], collectives=[], faults=[],
    )  # fmt: skip

    timer = Timer(device)
    ranks = dist.get_world_size()
    phases = ("train_fwd", "train_fwd_bwd")
    rows = {(n, p): {**conditions(CASES[n]), "phase": p, "grad": p != phases[0]} for n in names for p in phases}

    def keep(what: str, make: Callable[[], Any], part: str = "") -> None:
        """Add what `make` gives to `part`, or to the rows of the case `what`; nothing where the time is over."""
        late = torch.tensor(time.perf_counter() - BEGUN > options.seconds, dtype=torch.int32, device=device)
        dist.broadcast(late, 0)
        if late:
            document["faults"].append(f"{what}: no time left")
        elif part:
            document[part] += make()
        else:
            for phase, figures in make().items():
                rows[what, phase] |= figures
        if dist.get_rank() == 0:
            timed = [row for row in rows.values() if "wall_ms" in row]
            write_json(options.json, {**document, "rows": [*timed, *document["rows"]]})

    even, uneven, empty = [96] * ranks, [200, 1] + [64] * (ranks - 2), [130, 0] + [1] * (ranks - 2)
    for precision in PRECISIONS:
        for counts in (even, uneven, empty) if precision != "fp16" else (uneven,):
            keep(precision, lambda p=precision, c=counts: [check(device, p, c)], "checks")
    for name in names:
        keep(name, lambda name=name: time_case(CASES[name], device, timer, compiled=False))
    keep("wrapped", lambda: list(wrapped(CASES[names[0]], device, timer)), "rows")
    keep("compiled", lambda: [check(device, "bf16", even, compiled=True)], "checks")
    for name in names:
        keep(name, lambda name=name: time_case(CASES[name], device, timer, compiled=True))
    keep("collectives", lambda: list(collectives(device, timer)), "collectives")
    if device.type == "cuda":  # last: a capture that fails leaves a communicator in an unknown state
        for counts in (even, uneven, empty):
            keep("captured", lambda c=counts: [check_captured(device, c)], "checks")
        for name in names:
            keep(name, lambda name=name: time_graphs(CASES[name], device, timer))
    right = all(c["right"] for c in document["checks"])
    tell("all right" if right and not document["faults"] else f"NOT all right: {document['faults']}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if right else 1


BEGUN = time.perf_counter()
if __name__ == "__main__":
    sys.exit(main())
