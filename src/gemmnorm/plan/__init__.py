"""Problem → Plan: which strategy, which kernels, which tiles and grids, which workspace. Pure: no GPU is asked.

A plan is data. `runtime` runs it, `export` prints it as C++, `explain` prints it as English; none of them
decides anything. Grids and sizes are expressions in the batch size (`Extent`), because an exported file has the feature
counts as constants and the batch as an argument.
"""

from .cast import CAST
from .choice import (
    STRATEGIES,
    applicable,
    cached_plan,
    check_keep_product,
    check_strategy,
    decide_keep_product,
    forcing,
    make_plan,
    parse_keep_product,
    preference,
    ranking,
    set_keep_product,
    set_strategy,
    why_no_kernels,
)
from .comparison import comparison, kept, kept_bytes
from .problem import C_TYPES, CHIPS, DTYPE_BYTES, Chip, Problem, c_types, chip_for, target, type_members
from .split import PREPARED, prepare
from .steps import GROUP_ROWS, OWN_GEMM, ROLES, Buffer, Extent, Launch, Map, Plan, Product, Step

__all__ = [
    "CAST",
    "CHIPS",
    "C_TYPES",
    "DTYPE_BYTES",
    "GROUP_ROWS",
    "OWN_GEMM",
    "PREPARED",
    "ROLES",
    "STRATEGIES",
    "Buffer",
    "Chip",
    "Extent",
    "Launch",
    "Map",
    "Plan",
    "Problem",
    "Product",
    "Step",
    "applicable",
    "c_types",
    "cached_plan",
    "check_keep_product",
    "check_strategy",
    "chip_for",
    "comparison",
    "decide_keep_product",
    "forcing",
    "kept",
    "kept_bytes",
    "make_plan",
    "parse_keep_product",
    "preference",
    "prepare",
    "ranking",
    "set_keep_product",
    "set_strategy",
    "target",
    "type_members",
    "why_no_kernels",
]
