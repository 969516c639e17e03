"""What is reported of a candidate and not demanded: ways to use it that many honest files do not know, and warnings.

Under autocast the original itself rounds to half precision, and its limits follow from that as in every case: the
errors that one rounding in each operation makes, the operands of products among them, and the original's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .equality import compare
from .golden import Reference
from .trial import AUTOCAST, AUTOCAST_FP16, STATISTICS

__all__ = ["FATAL", "difference", "property_of", "sentences", "verdict_of"]

# Settings without which a program's other calls compute something else.
FATAL = ("default dtype", "default device", "grad mode", "autocast")
_REPORTED = {STATISTICS: "frozen_statistics", AUTOCAST: "autocast", AUTOCAST_FP16: "autocast_float16"}


def property_of(reference: Reference) -> str:
    """The property that a case is there for; "" where what it compares is demanded."""
    return next((_REPORTED[word] for word in reference.case.use if word in _REPORTED), "")


def verdict_of(reference: Reference, checks: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether all is right; None where zeros in place of every output would be as well, and nothing is wrong."""
    if not all(check["ok"] for check in checks):
        return False
    for name, eager in reference.eager.items():
        if name.startswith("output"):
            measures = compare(torch.zeros_like(eager), eager, reference.golden[name], reference.limits.get(name))
            if not all(m.ok for m in measures):
                return True
    return None


def difference(checks: Sequence[Mapping[str, Any]]) -> str:
    """What differs, in words: it raises, or the first other dtype, or the first other value; "" where nothing does."""
    wrong = [check for check in checks if not check["ok"]]
    if raised := next((check["note"] for check in wrong if check["quantity"] == "call"), ""):
        return str(raised)
    first = next((check for check in wrong if check["measure"] == "dtype"), wrong[0] if wrong else None)
    if first is None:
        return ""
    what = "dtype" if first["measure"] == "dtype" else "value"
    told = first["note"].removeprefix("dtype ")
    told = told or f"{first['measure']} error {first['ratio']:.1f} times what rounding explains"
    return f"gives another {what} of {first['quantity']} in {first['phase']} mode ({told})"


def sentences(properties: Mapping[str, Any], differs: Mapping[str, str]) -> list[str]:
    """Warnings: what a candidate's properties mean to who uses it."""
    said = []
    if properties["same_parameter_names"] and not properties["same_drawing_order"]:
        said.append(
            "DRAWING ORDER: after the same seed the constructors draw different weights. Here weights are loaded "
            "by name; a harness that matches weights only by seeding will call the two files different."
        )
    if properties["same_parameter_names"] and not properties["same_parameter_order"]:
        said.append(
            "PARAMETER ORDER: `parameters()` gives them in another order, and an optimizer's state_dict goes by that: "
            "one that was saved with the original does not fit."
        )
    if properties["deterministic"] is False:
        said.append("two runs on the same inputs differ in their last bits (not deterministic)")
    if properties["weights_prepacked"]:
        said.append(
            "PREPACKED: it keeps something made from the weights until PyTorch's version counters move. A timing "
            "with unchanged weights leaves that work out, and a change through .data does not reach it."
        )
    if properties["moves_generator"]:
        said.append("a call draws random numbers, which the original does not: later draws of a program differ")
    if properties["threads"]:
        said.append(f"threads that a call starts still run when it returns: {', '.join(properties['threads'])}")
    if properties["output_needed"]:
        said.append("its backward needs the output: who writes to that in place gets PyTorch's error")
    if properties["one_backward"]:
        said.append("a second backward through the same graph gets PyTorch's error, as of compiled models")
    if properties["frozen_statistics"] is False:
        said.append(
            "with frozen statistics (its normalisations alone in evaluation, as by `model.bn.eval()`) it raises or "
            "computes something else"
        )
    for name, dtype in (("autocast", "bfloat16"), ("autocast_float16", "float16")):
        if properties[name] is False:
            said.append(f"under `torch.autocast` in {dtype} around it, it {differs.get(name, 'differs')}")
    if names := properties["missing_arguments"]:
        said.append(f"its forward takes no input by the name {' or '.join(names)}: a call with that name fails")
    if "" in (properties["hooks_not_run"] or ()):
        said.append("a call of it does not run the hooks that are registered on it")
    if told_so := properties["hooks_raise"]:
        said.append(f"with hooks on its modules a call of it raises {told_so}")
    if told_so := properties["pickle_raises"]:
        said.append(f"pickling it raises {told_so}")
    if other := properties["other_strides"]:
        own, wanted = (" and ".join(str(tuple(strides)) for strides in side) for side in other)
        said.append(f"its outputs lie in memory by other strides: {own}, the original's {wanted}")
    if left := [name for name in properties["settings_left"] if name not in FATAL]:
        said.append(f"loading it or a call of it leaves settings of the process changed: {', '.join(left)}")
    if told := [prefix for prefix in ("copy: ", "assign: ") if (properties["instances"] or "").startswith(prefix)]:
        said.append(properties["instances"].removeprefix(told[0]))
    close = properties["allclose_eager"]
    bad = [phase for phase in ("train", "eval") if close[phase] is False]
    if bad:
        said.append(
            f"outputs are not within {close['tolerance']:g} of the original's own ({' and '.join(bad)} mode), a "
            "test that some harnesses make; against float64 they may still be as good or better"
        )
    return said
