"""`Params` and `Config` of a kernel: bound by name, and nothing else compiles."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from gemmnorm import plan
from gemmnorm.plan import Problem, params
from gemmnorm.runtime import driver, sources

HOPPER = plan.chip_for(90, 132)
PROBLEM = Problem(256, 512, 512, *["bfloat16"] * 4, "native", None, True, True, True, HOPPER)
LAUNCHES = [
    *plan.make_plan(PROBLEM, "one_kernel").launches,
    *plan.make_plan(PROBLEM, "cublas_folded_bn").launches,
    *plan.make_plan(PROBLEM, "cublas_folded_bn", "backward").launches,
]
needs_compiler = pytest.mark.skipif(driver.unavailable() is not None, reason="no NVRTC")


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.entry)
def test_fields_have_the_offsets_of_the_struct_format(launch):
    found = params.layout(launch, PROBLEM)
    assert {f.name for f in found.fields} == set(launch.params)
    assert struct.calcsize(found.format) == found.size
    codes = [code for code in found.format[1:].replace("128s", "m") if code.isalpha() and code != "x"]
    at = 0
    for field, code in zip(found.fields, codes, strict=True):
        assert field.offset == at
        at += {"m": 128, "Q": 8, "i": 4, "f": 4}[code]


@needs_compiler
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.entry)
def test_a_field_by_another_name_does_not_compile(launch):
    renamed = replace(
        launch,
        params=("features_", *(field for field in launch.params if field != "features")),
        roles=(*launch.roles, ("features_", "features")),
    )
    driver.compile_report(launch, PROBLEM, 90)
    with pytest.raises(Exception, match="no member"):
        driver.compile_report(renamed, PROBLEM, 90)


@needs_compiler
def test_a_member_of_config_by_another_name_does_not_compile():
    launch = LAUNCHES[0]
    config = tuple(("kSharedByte" if name == "kSharedBytes" else name, value) for name, value in launch.config)
    with pytest.raises(Exception, match="no member"):
        driver.compile_report(replace(launch, config=config), PROBLEM, 90)


@needs_compiler
def test_fields_that_change_places_on_one_side_do_not_compile(monkeypatch):
    """The host packs by the layout; a struct whose fields lie elsewhere fails its assertion."""
    launch = next(x for x in LAUNCHES if x.function == "cluster_normalize")
    text = sources.translation_unit(launch, PROBLEM)
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if "float* mean;" in line)
    second = next(i for i, line in enumerate(lines) if "float* rstd;" in line)
    lines[first], lines[second] = lines[second], lines[first]
    with pytest.raises(Exception, match="the host packs it so"):
        driver._program("\n".join(lines), 90).compile("cubin")


def test_the_order_of_the_list_decides_nothing():
    """Whatever the order of a plan's list, host and device agree: both come from the layout."""
    launch = LAUNCHES[0]
    turned = replace(launch, params=launch.params[::-1])
    assert params.struct_text("P", turned, PROBLEM) != params.struct_text("P", launch, PROBLEM)
    for one in (launch, turned):
        text = params.struct_text("P", one, PROBLEM)
        for field in params.layout(one, PROBLEM).fields:
            assert f"GEMMNORM_OFFSET(P, {field.name}) == {field.offset}" in text
