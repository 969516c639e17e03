"""Statistics over the ranks of a process group: the merge, and processes against one with the whole batch."""

from __future__ import annotations

import datetime
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.distributed.fsdp
import torch.multiprocessing
from emulator import COMPILER, emulated
from support import Chain, worst
from torch import nn

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d, linear_scale_batch_norm, plan
from gemmnorm.op import sync as collective
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import peers

ROOT = Path(__file__).parents[1]
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available() or sys.platform == "win32",
    reason="torch.distributed with gloo is not available",
)


@pytest.mark.parametrize("counts", [[5], [3, 4], [1, 7, 2], [4, 0, 3], [0, 0, 5]])
def test_merge_is_exact_in_the_number_of_rows(counts):
    parts = [torch.randn(n, 6, dtype=torch.float64) + 1e6 for n in counts]
    means = torch.stack([p.mean(0) if len(p) else torch.zeros(6).double() for p in parts])
    m2 = torch.stack([(p - m).square().sum(0) for p, m in zip(parts, means, strict=True)])
    total, mean, merged = collective.merge(torch.tensor(counts).double(), means, m2)
    union = torch.cat(parts)
    assert total.item() == len(union)
    assert worst(mean, union.mean(0), 1e-14, 0.0) is None
    assert worst(merged / len(union), union.var(0, unbiased=False), 1e-8, 0.0) is None


def test_without_a_process_group_there_is_one_rank():
    assert collective.world_size(None) == 1


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _rank(rank: int, port: int, ranks: int, work: Callable[..., Any], arguments: tuple[Any, ...], answers) -> None:
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=20)
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timeout)
        answers.put((rank, work(rank, *arguments)))
        if work is not _dies:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise


def on_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each rank of a gloo group. Tensors go as numpy arrays."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch._dynamo"])  # once for all ranks
    answers, port = context.Queue(), _free_port()
    processes = [context.Process(target=_rank, args=(r, port, ranks, work, arguments, answers)) for r in range(ranks)]
    for p in processes:
        p.start()
    found = dict(answers.get(timeout=120) for _ in processes)
    for p in processes:
        p.join(30)
    assert not any(isinstance(f, str) for f in found.values()), found
    return [found[r] for r in range(ranks)]


def _numpy(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: t.detach().clone().numpy() for name, t in tensors.items()}


def _samples(rows: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(sum(rows), 6, dtype=dtype), torch.randn(sum(rows), 5, dtype=dtype)


def _two_steps(rank: int, rows: list[int], options: dict[str, Any], how: str) -> dict[str, Any]:
    """Outputs and gradients of two steps, the gradients of parameters summed over the ranks, and the buffers."""
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(6, 5, process_group=dist.group.WORLD, **options).double()
    graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g)(graph, examples)

    call: Any = module
    if how == "compiled":
        call = torch.compile(module, fullgraph=True, backend=backend, dynamic=False)
    elif how == "DistributedDataParallel":
        call = nn.parallel.DistributedDataParallel(module)
    every, grads = _samples(rows, torch.float64)
    x, grad = every.split(rows)[rank], grads.split(rows)[rank]
    found = {}
    for turn in range(2):
        x = x.detach().clone().requires_grad_()
        module.zero_grad()
        y = call(x)
        y.backward(grad)
        found |= {f"y {turn}": y, f"x {turn}": x.grad}
    for name, p in module.named_parameters():
        dist.all_reduce(p.grad)  # which DistributedDataParallel has averaged
        found[name] = p.grad
    found |= dict(module.named_buffers())
    module.eval()
    found["evaluated"] = module(every)
    assert len(graphs) == (how == "compiled")
    return _numpy(found)


@needs_gloo
@pytest.mark.parametrize(("rows", "options", "how"), [
    ([8, 8], {"activation": "relu"}, "eager"),
    ([3, 9], {"momentum": None, "activation": "silu"}, "eager"),
    ([7, 0], {"affine": False, "bias": False}, "eager"),
    ([0, 5, 1], {"activation": "gelu", "scale": (1,)}, "eager"),
    ([1, 1, 1], {"scale": False}, "eager"),
    ([4, 5], {"scale": (1, 5)}, "eager"),
    ([6, 3], {"activation": "silu"}, "compiled"),
    ([6, 0], {"activation": "silu"}, "DistributedDataParallel"),
])  # fmt: skip
def test_ranks_are_one_batch(rows, options, how):
    found = on_ranks(len(rows), _two_steps, rows, options, how)
    torch.manual_seed(0)
    ours = LinearScaleBatchNorm1d(6, 5, **options).double()
    norm = {k: v for k, v in options.items() if k in ("momentum", "affine")}
    shape = None if options.get("scale") is False else options.get("scale", (5,))
    original = Chain(6, 5, options.get("bias", True), shape, options.get("activation"), **norm).double()
    original.load_state_dict(ours.state_dict())
    every, grads = _samples(rows, torch.float64)
    for turn in range(2):
        x = every.clone().requires_grad_()
        original.zero_grad()
        y = original(x)
        y.backward(grads)
        for name, expected in ((f"y {turn}", y), (f"x {turn}", x.grad)):
            got = torch.cat([torch.from_numpy(f[name]) for f in found])
            assert worst(got, expected, 1e-8, 1e-9) is None
    for rank in found:
        for name, p in original.named_parameters():
            assert worst(torch.from_numpy(rank[name]), p.grad, 1e-8, 1e-9) is None, name
        for name, b in original.named_buffers():
            assert worst(torch.from_numpy(rank[name].reshape(b.shape)), b, 1e-9, 1e-10) is None, name
            assert rank[name].tobytes() == found[0][name].tobytes(), name
        assert worst(torch.from_numpy(rank["evaluated"]), original.eval()(every), 1e-9, 1e-10) is None


def _own_statistics(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(6, 5, track_running_stats=False, process_group=dist.group.WORLD).eval()
    x = torch.randn(8, 6).split([3, 5])[rank]
    return _numpy(
        {"y": module(x), "own": nn.functional.batch_norm(module.gemm(x) * module.scale, None, None, training=True)}
    )


@needs_gloo
def test_an_evaluation_by_the_batch_is_by_the_ranks_own_rows_as_in_sync_batchnorm():
    for found in on_ranks(2, _own_statistics):
        assert worst(torch.from_numpy(found["y"]), torch.from_numpy(found["own"]), 1e-4, 1e-5) is None


def _over_all_ranks(rank: int, rows: list[int]) -> dict[str, Any]:
    """A module over a SyncBatchNorm without a group of its own, which PyTorch takes for all ranks."""
    torch.manual_seed(0)
    bn = torch.nn.SyncBatchNorm(5)
    module = LinearScaleBatchNorm1d.from_modules(torch.nn.Linear(6, 5), bn)
    assert module.bn is bn and type(module.to_modules()[1]) is torch.nn.SyncBatchNorm
    return _numpy({"y": module(torch.randn(sum(rows), 6).split(rows)[rank]), "mean": bn.running_mean})


@needs_gloo
def test_a_sync_batchnorm_without_a_group_is_over_all_ranks():
    rows = [3, 9]
    found = on_ranks(len(rows), _over_all_ranks, rows)
    torch.manual_seed(0)
    linear, bn = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)
    y = bn(linear(torch.randn(sum(rows), 6)))
    assert worst(torch.cat([torch.from_numpy(f["y"]) for f in found]), y, 1e-4, 1e-5) is None
    assert all(worst(torch.from_numpy(f["mean"]), bn.running_mean, 1e-5, 1e-6) is None for f in found)


def _emulated(rank: int, rows: list[int], how: str) -> dict[str, Any]:
    """Two steps by the kernels, under autocast. `how`: "compiled", "peers", or one rank refuses those."""
    compiled = how == "compiled"
    if how == "one refuses" and rank == 1:
        os.environ["GEMMNORM_PEERS"] = "0"
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(64, 40, process_group=dist.group.WORLD, activation="silu")
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    torch.manual_seed(1)
    x = torch.randn(sum(rows), 64).split(rows)[rank].requires_grad_()
    reductions = mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce)
    autocast = torch.autocast("cpu", torch.bfloat16)
    with emulated(plan.chip_for(90, 3)), autocast, runtime.recording() as plans, reductions as reduced:
        for _ in range(2):
            x.grad = module.gemm.weight.grad = None
            y = call(x)
            y.square().sum().backward()
    assert [p.strategy for p in plans] == (["gemm_stats_apply"] * 2 if rows[rank] else [])
    assert bool(reduced.call_count) == (how == "one refuses")
    assert [bool(p) for p in peers._known.values()] == ([] if compiled else [how == "peers"])
    assert y.dtype == torch.float32 and module.gemm.weight.grad.dtype == torch.float32
    dist.all_reduce(module.gemm.weight.grad)
    return _numpy({"y": y, "x": x.grad, "weight": module.gemm.weight.grad, "mean": module.bn.running_mean})


@needs_gloo
@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize(
    ("rows", "how"), [([70, 0, 130], "peers"), ([130, 70], "one refuses"), ([130, 70], "compiled")]
)
def test_ranks_are_one_batch_by_the_kernels(rows, how):
    found = on_ranks(len(rows), _emulated, rows, how)
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(64, 40, activation="silu").double()
    torch.manual_seed(1)
    x = torch.randn(sum(rows), 64).double().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    expected = {"y": y, "x": x.grad}
    for name, value in expected.items():
        got = torch.cat([torch.from_numpy(f[name]) for f in found]).double()
        assert float((got - value.detach()).norm() / value.detach().norm()) < 0.02, name
    for rank in found:
        got = torch.from_numpy(rank["weight"]).double()
        assert float((got - module.gemm.weight.grad).norm() / got.norm()) < 0.02
        assert rank["mean"].tobytes() == found[0]["mean"].tobytes()


# --- the ways in ------------------------------------------------------------------------------------------------------


def _head() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 5), nn.Flatten(0, -2), nn.BatchNorm1d(5, affine=False),
    ).double()  # fmt: skip


def _converted(rank: int, rows: list[int], when: str) -> dict[str, Any]:
    """A step of a head whose BatchNorm is converted before or after `fuse`, or restored in between."""
    ranks = [r for r, n in enumerate(rows) if n]  # the group: the others are on their own
    group = dist.new_group(ranks)
    if rank not in ranks:
        return {}
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    model = _head()
    if when == "before":
        model = gemmnorm.fuse(convert(model, group))
    else:
        model = convert(gemmnorm.fuse(model), group)
    every, grads = _samples(rows, torch.float64)
    for turn in range(2):
        model.zero_grad()
        (model(every.split(rows)[rank]) * grads.split(rows)[rank]).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
                p -= 0.5 * p.grad
        if when == "restored" and turn == 0:
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder, dist.get_global_rank(group or dist.group.WORLD, 0), group)
            checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0], process_group=group)
            model = convert(gemmnorm.fuse(_head()), group)
            state = {"model": model.state_dict()}
            checkpoint.load(state, checkpoint_id=folder[0], process_group=group)
            model.load_state_dict(state["model"])
    return _numpy(model.state_dict())


@needs_gloo
@pytest.mark.parametrize("when", ["before", "after", "restored"])
@pytest.mark.parametrize("rows", [[6, 3], [5, 0, 4]], ids=["the world", "two ranks of three"])
def test_converted_models_are_one_batch(rows, when):
    if when == "restored" and not all(rows) and torch.__version__ < "2.6":
        pytest.skip("PyTorch 2.4 cannot load a checkpoint in a group that is not the world")
    found = on_ranks(len(rows), _converted, rows, when)
    model = _head()
    every, grads = _samples(rows, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (model(every) * grads).sum().backward()
        optimizer.step()
    for rank in filter(None, found):
        for name, expected in model.state_dict().items():
            assert worst(torch.from_numpy(rank[name]).view_as(expected), expected, 1e-8, 1e-9) is None, name


@needs_gloo
@pytest.mark.parametrize("flag", [[], ["--eager"]], ids=["fused", "eager"])
def test_the_example_runs_on_two_processes(flag):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "simsiam_sync.py"), "--steps", "3", *flag]
    paths = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | paths)
    # PyTorch's gloo, by itself too, now and then aborts a process that has ended its work, on a machine that is busy.
    aborted = "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr[-2000:]
    assert re.search(r"loss -0\.\d+, \d+ samples/s on 2 ranks", done.stdout), done.stdout


def _fully_sharded(rank: int, rows: list[int]) -> dict[str, Any]:
    """A step in FSDP2 with bfloat16 parameters: the statistics stay float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (len(rows),))
    one = fully_shard(nn.Linear(1, 1), mesh=mesh)
    one(torch.ones(1, 1)).sum().backward()
    times = len(rows) / float(one.weight.grad.full_tensor())  # PyTorch 2.8 adds up, others take the mean
    model = _head().float()
    model = gemmnorm.fuse(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    every, grads = (t.float() for t in _samples(rows, torch.float64))
    y = model(every.split(rows)[rank])
    assert y.dtype == torch.bfloat16
    (y.float() * grads.split(rows)[rank]).sum().backward()
    assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())
    found = {name: p.grad.full_tensor() * times for name, p in model.named_parameters()}
    return _numpy(found | {"mean": model[1].running_mean, "var": model[-1].running_var})


@needs_gloo
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "fully_shard"), reason="PyTorch 2.6 has fully_shard")
def test_fully_sharded_with_half_precision_parameters():
    rows = [40, 24]
    found = on_ranks(2, _fully_sharded, rows)
    model = _head()
    every, grads = _samples(rows, torch.float64)
    (model(every) * grads).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    expected |= {"mean": model[1].running_mean, "var": model[-1].running_var}
    for rank in found:
        for name, want in expected.items():
            size = float(expected["0.weight"].norm()) if name == "3.bias" else float(want.norm())
            assert float((torch.from_numpy(rank[name]).double() - want).norm()) < 0.05 * size, name
        assert rank["mean"].tobytes() == found[0]["mean"].tobytes()


def _column_parallel(rank: int, features: int) -> dict[str, Any]:
    """A step of a module whose features are shared out, rows and x the same on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def share(name: str, module: nn.Module, mesh: Any) -> None:
        for key, t in [*module._parameters.items(), *module._buffers.items()]:
            if t is None:
                continue
            t = distribute_tensor(t, mesh, [Shard(0) if t.dim() and t.numel() > 1 else Replicate()])
            if key in module._buffers:
                module._buffers[key] = t
            else:
                module._parameters[key] = nn.Parameter(t)

    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(6, features, scale=(1,), activation="silu").double()
    distribute_module(module, init_device_mesh("cpu", (2,)), share)
    torch.manual_seed(1)
    x = torch.randn(9, 6, dtype=torch.float64).requires_grad_()
    y = module(x)
    (y.full_tensor() ** 2).sum().backward()
    found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    found |= {name: b.full_tensor() for name, b in module.named_buffers()}
    with pytest.raises(ValueError, match="bn_bias: expected a DTensor on the weight's mesh"):
        linear_scale_batch_norm(x, module.gemm.weight, bn_bias=torch.zeros(features), training=True)
    return _numpy(found | {"y": y.full_tensor(), "x": x.grad})


@needs_gloo
@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "fully_shard"), reason="PyTorch 2.5 has torch.distributed.tensor"
)
@pytest.mark.parametrize("features", [8, 5])
def test_features_that_ranks_share_out(features):
    found = on_ranks(2, _column_parallel, features)
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(6, features, scale=(1,), activation="silu").double()
    torch.manual_seed(1)
    x = torch.randn(9, 6, dtype=torch.float64).requires_grad_()
    y = module(x)
    (y**2).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()} | dict(module.named_buffers())
    for rank in found:
        for name, want in (expected | {"y": y, "x": x.grad}).items():
            assert worst(torch.from_numpy(rank[name]).view_as(want), want, 1e-8, 1e-9) is None, name


# --- faults -----------------------------------------------------------------------------------------------------------


def _different_features(rank: int) -> str:
    module = LinearScaleBatchNorm1d(4, 5 if rank == 1 else 7, process_group=dist.group.WORLD)
    with pytest.raises(ValueError) as raised:
        module(torch.randn(3, 4))
    return (str(raised.value),)


@needs_gloo
def test_different_numbers_of_features_are_refused_on_every_rank():
    for (message,) in on_ranks(3, _different_features):
        assert message.endswith("got 5 on rank 1; 7 on rank 0, 2"), message


def _dies(rank: int) -> tuple[str, float]:
    module = LinearScaleBatchNorm1d(4, 5, process_group=dist.group.WORLD)
    x = torch.randn(3, 4)
    module(x)
    if rank == 1:
        return "", 0.0
    begun = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        for _ in range(100):
            module(x)
    return str(raised.value), time.monotonic() - begun


@needs_gloo
def test_a_rank_that_leaves_is_the_engines_own_error_on_the_others():
    for message, seconds in on_ranks(3, _dies)[::2]:
        assert re.search("gloo|Connection|closed|timed out", message, re.IGNORECASE), message
        assert seconds < 25
