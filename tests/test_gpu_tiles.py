"""What multiplies by tiles in more than one way, on a GPU: twice, beside neighbours, by tiles that overlap."""

from __future__ import annotations

import gram_families
import pytest
import torch
import ways
from gpu_support import SMOOTH, check, check_without_gradients

from gemmnorm import plan
from gemmnorm.runtime import call as runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="not Hopper"
    ),
]


@pytest.mark.parametrize("sizes", [(65536, 128, 1024), (5000, 264, 520), (3001, 1000, 264), (300, 16, 136)])
@pytest.mark.parametrize("family", gram_families.ALL)
def test_statistics_by_the_gram_matrix(family, sizes, forced):
    forced(ways.by_gram)
    gram_families.check(family, *sizes, "cuda")
    check("gemm_stats_apply", "fp16", *sizes, True, scale_shape=(sizes[-1],), activation=SMOOTH)


@pytest.mark.parametrize("sizes", [(131072, 64, 64), (20001, 128, 1024), (5000, 264, 520), (300, 16, 136)])
@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_multiplied_twice(name, sizes):
    with plan.forcing(lambda c: c.phase == "backward" or getattr(c.variant, "schedule", "") == "two-pass"):
        for bias in (True, False):
            check("gemm_stats_apply", name, *sizes, True, bias=bias, scale_shape=(sizes[-1],), activation=SMOOTH)


@pytest.mark.parametrize("sizes", [(5300, 1000, 2056), (3001, 72, 392), (1040, 888, 8904), (300, 200, 136)])
@pytest.mark.parametrize("name", ["bf16", "tf32", "fp16"])
@pytest.mark.parametrize("schedule", ["evaluate", "statistics", "two-pass", "gram", "co-resident", "deferred"])
def test_neighbours_load_x_together(schedule, name, sizes, forced):
    if (schedule, name) == ("gram", "tf32"):
        pytest.skip("no such kernel")
    forced(lambda c: c.phase == "backward" or ways.sharing_x(schedule)(c))
    strategy = "one_kernel" if schedule in ("evaluate", "co-resident", "deferred") else "gemm_stats_apply"
    batch, inner, features = sizes
    sizes = (batch, inner + 4 * (name == "tf32"), features)  # rows of x that are no whole sectors of 32 bytes
    with runtime.recording() as plans:
        if schedule == "evaluate":
            check_without_gradients(name, *sizes, False)
        else:
            check(strategy, name, *sizes, True, scale_shape=(sizes[-1],), activation=SMOOTH)
    own = [launch for found in plans for launch in found.launches if launch.function == "fused_gemm"]
    assert any(launch.member("kSharing") == 2 for launch in own)


@pytest.mark.parametrize(
    "sizes", [(1, 64, 8), (33001, 40, 568), (5000, 264, 1000), (30720, 128, 5768), (300, 200, 136)]
)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["evaluate", "two-pass", "gram"])
@pytest.mark.parametrize("sharing", [1, 2])
def test_rows_that_begin_in_the_middle_of_a_sector(sharing, schedule, name, sizes, forced):
    """By tiles that overlap by eight columns."""
    batch, inner, features = sizes
    if batch == 1 and schedule != "evaluate":
        pytest.skip("no batch to take statistics of")
    if sharing == 2 and (inner * 2 % 32 == 0 or features <= 128):
        pytest.skip("neighbours share x where its rows are no whole sectors")

    def wanted(c):
        return ways.overlapping(c) and c.variant.schedule == schedule and c.variant.sharing == sharing

    forced(lambda c: c.phase == "backward" or wanted(c))
    with runtime.recording() as plans:
        if schedule == "evaluate":
            check_without_gradients(name, *sizes, False)
        else:
            check_without_gradients(name, *sizes, True, strategy="gemm_stats_apply")
            check("gemm_stats_apply", name, *sizes, True, scale_shape=(features,), activation=SMOOTH)
    assert all(
        any(m.role == "map_odd_y" for m in found.launches[-1].maps) for found in plans if found.phase == "forward"
    )
