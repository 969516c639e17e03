"""Statistics over the ranks of a process group: the merge, and two processes against SyncBatchNorm's definition."""

from __future__ import annotations

import os
import socket
import sys
import traceback

import pytest
import torch
import torch.multiprocessing
from support import Chain, worst

from gemmnorm import LinearScaleBatchNorm1d
from gemmnorm.op import sync as collective

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


def _rank(rank: int, port: int, rows: list[int], options: dict, dtype: torch.dtype, answers) -> None:
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", rank=rank, world_size=len(rows))
        group = torch.distributed.group.WORLD
        torch.manual_seed(0)
        module = LinearScaleBatchNorm1d(6, 5, process_group=group, **options).to(dtype)
        torch.manual_seed(1)
        every = torch.randn(sum(rows), 6, dtype=dtype)
        grads = torch.randn(sum(rows), 5, dtype=dtype)
        begin = sum(rows[:rank])
        found = []
        for _ in range(2):
            x = every[begin : begin + rows[rank]].clone().requires_grad_()
            module.zero_grad()
            y = module(x)
            y.backward(grads[begin : begin + rows[rank]])
            found.append((y.detach(), x.grad))
        sums = {}
        for name, p in module.named_parameters():
            if p.grad is not None:
                torch.distributed.all_reduce(p.grad)
                sums[name] = p.grad.clone()
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        module.eval()
        evaluated = module(every)
        answers.put((rank, [tuple(t.numpy() for t in f) for f in found], {k: v.numpy() for k, v in sums.items()},
                     {k: v.numpy() for k, v in buffers.items()}, evaluated.detach().numpy()))  # fmt: skip
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise


@needs_gloo
@pytest.mark.parametrize(("rows", "options"), [
    ([8, 8], {"activation": "relu"}),
    ([3, 9], {"momentum": None}),
    ([7, 0], {"affine": False, "bias": False}),
    ([1, 1], {"scale": False}),
])  # fmt: skip
def test_two_ranks_are_one_batch(rows, options):
    dtype = torch.float64
    context = torch.multiprocessing.get_context("spawn")
    answers, port = context.Queue(), _free_port()
    processes = [context.Process(target=_rank, args=(r, port, rows, options, dtype, answers)) for r in range(len(rows))]
    for p in processes:
        p.start()
    found = sorted((answers.get(timeout=120) for _ in processes), key=lambda a: a[0])
    for p in processes:
        p.join(30)
    assert all(len(f) == 5 for f in found), found

    torch.manual_seed(0)
    ours = LinearScaleBatchNorm1d(6, 5, **options).to(dtype)
    norm = {k: v for k, v in options.items() if k in ("momentum", "affine")}
    shape = None if options.get("scale") is False else (5,)
    original = Chain(6, 5, options.get("bias", True), shape, options.get("activation"), **norm).to(dtype)
    original.load_state_dict(ours.state_dict())
    torch.manual_seed(1)
    every, grads = torch.randn(sum(rows), 6, dtype=dtype), torch.randn(sum(rows), 5, dtype=dtype)
    for turn in range(2):
        x = every.clone().requires_grad_()
        original.zero_grad()
        y = original(x)
        y.backward(grads)
        for which, expected in ((0, y), (1, x.grad)):
            got = torch.cat([torch.from_numpy(f[1][turn][which]) for f in found])
            assert worst(got, expected, 1e-8, 1e-9) is None
    for rank in found:
        for name, p in original.named_parameters():
            assert worst(torch.from_numpy(rank[2][name]), p.grad, 1e-8, 1e-9) is None, name
        for name, b in original.named_buffers():
            got = torch.from_numpy(rank[3][name].reshape(b.shape))
            assert worst(got, b, 1e-9, 1e-10) is None, name
        assert worst(torch.from_numpy(rank[4]), original.eval()(every), 1e-9, 1e-10) is None
