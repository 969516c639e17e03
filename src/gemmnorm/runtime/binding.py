"""A plan bound to its loaded kernels: what a call allocates, and where each kernel argument comes from.

Everything that the plan alone decides is worked out once (`bind`), so that a call is a few allocations, one list of
addresses, and the launches.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan import CAST, DTYPE_BYTES, PREPARED, Buffer, Launch, Map, Plan, Problem, Product, params
from . import driver

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}
# The tensors that a call hands in, and the numbers, in order.
INPUTS = {
    "forward": (
        "x", "weight", "bias", "scale", "running_mean", "running_var", "num_batches_tracked", "bn_weight", "bn_bias",
    ),
    "backward": ("grad_y", "x", "weight", "bias", "scale", "bn_weight", "bn_bias", "product", "statistics"),
    "prepare": ("weight", "weight_checksums"),
    "statistics": ("x", "weight", "bias", "scale", "num_batches_tracked"),
    "normalize": (
        "gathered", "product", "group_mean", "x", "weight", "bias", "scale",
        "running_mean", "running_var", "num_batches_tracked", "bn_weight", "bn_bias",
    ),
    "sums": ("grad_y", "product", "offset", "statistics", "bias", "scale", "bn_weight", "bn_bias"),
    "gradient": (
        "grad_y", "product", "offset", "statistics", "sums", "x", "weight", "bias", "scale", "bn_weight", "bn_bias",
    ),
}  # fmt: skip
SCALARS = ("scale_stride", "scale_value", "momentum", "eps", "batch", "features", "in_features")
# What a forward keeps per feature, as rows of one float32 tensor `statistics` [2 or 2 + groups, O]: the mean of the
# product, 1/sqrt(var + eps), and where the product is stored minus means of groups of rows, those. With statistics over
# several ranks the number of all rows comes third [3, O], and the groups' means are a tensor of their own.
_KEPT = ("mean", "rstd", "row_count", "group_mean")
# Likewise what ranks add up in a backward: `sums` [2, O].
_SUMMED = ("mean_grad", "slope_grad")
# Bytes of scratch that a stream keeps for the plans that need no more: an allocation less for each of their calls.
BORROWED = 1 << 20


@dataclass(frozen=True)
class _Product:
    """A product by cuBLAS, of tensors by their place in the list."""

    out: int
    left: int
    right: int
    transpose_left: bool
    transpose_right: bool

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        out, left, right = tensors[self.out], tensors[self.left], tensors[self.right]
        if out is not None:
            assert left is not None and right is not None
            _multiply(
                left.t() if self.transpose_left else left, right.t() if self.transpose_right else right, out
            )  # fmt: skip


_WIDENS = hasattr(torch.ops.aten.mm, "dtype_out")  # PyTorch 2.8 and later


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """left · right into `out`, whose dtype may differ from theirs; in float32 it is not rounded in between."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif _WIDENS and left.is_cuda and out.dtype == torch.float32:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        out.copy_(torch.mm(left, right))


def _make_map(known: dict[int, Any], t: Tensor, described: Map) -> Any:
    """The tensor map of a matrix argument that is not `known` yet, by address: a map holds an address and sizes."""
    if len(known) >= 1024:
        known.clear()
    found = known[t.data_ptr()] = driver.tensor_map(t, described)
    return found


def _dense(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a contiguous tensor."""
    return shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _statistics_offset(problem: Problem) -> int:
    """Where the statistics begin in a `packed` forward's `kept`, behind the product: in bytes."""
    return -(-problem.batch * problem.out_features * DTYPE_BYTES[problem.dtype] // 256) * 256


def unpacked(kept: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Product [B, O] and statistics [2 or 2 + groups, O], as views of what a `packed` forward keeps."""
    shape, dtype = (problem.batch, problem.out_features), DTYPES[problem.dtype]
    product = kept[: math.prod(shape) * DTYPE_BYTES[problem.dtype]].view(dtype).view(shape)
    return product, kept[_statistics_offset(problem) :].view(torch.float32).view(-1, shape[1])


def scalars(problem: Problem, scale: Tensor | None, scale_value: float, momentum: float, eps: float) -> tuple[Any, ...]:
    """The numbers of `SCALARS`."""
    stride = 0 if scale is None or scale.numel() < problem.out_features else 1
    numbers = (float(np.float32(number)) for number in (scale_value, momentum, eps))
    return (stride, *numbers, problem.batch, problem.out_features, problem.in_features)


@dataclass(frozen=True)
class _Tensor:
    """One that a call allocates."""

    role: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Memory:
    """What a plan allocates: its outputs, then what dies with the call; and the roles that are parts of other tensors.

    Attributes:
        tensors: outputs first, `outputs` of them.
        parts: role, the tensor that it is part of, byte offset.
        borrowed: bytes of scratch that the stream keeps for it, or 0.
    """

    def __init__(self, chosen: Plan, inputs: Sequence[str], packed: bool) -> None:
        batch, features = chosen.problem.batch, chosen.problem.out_features
        self.tensors: list[_Tensor] = []
        self.parts: list[tuple[str, str, int]] = []

        def shape(buffer: Buffer) -> tuple[int, ...]:
            return tuple(extent.value(batch) for extent in buffer.shape)

        def allocate(buffer: Buffer) -> None:
            sizes, strides = _dense(shape(buffer))
            strides = (buffer.pitch, 1) if buffer.pitch else strides
            self.tensors.append(_Tensor(buffer.role, sizes, strides, DTYPES[buffer.dtype]))

        host, begin = ("kept", _statistics_offset(chosen.problem)) if packed else ("statistics", 0)
        into, of_features = ("sums", _SUMMED) if chosen.phase == "sums" else (host, _KEPT)
        if packed:
            self.parts.append(("product", host, 0))
        kept = [b for role in of_features for b in chosen.outputs if b.role == role]
        made = [b for b in chosen.outputs if b.role in CAST]
        for buffer in chosen.outputs:
            if buffer not in (*kept, *made) and not (packed and buffer.role == "product"):
                allocate(buffer)
        if kept:
            rows = 0
            for buffer in kept:
                self.parts.append((buffer.role, into, begin + 4 * features * rows))
                rows += math.prod(shape(buffer)) // features
            whole, dtype = (
                ((begin + 4 * features * rows,), torch.uint8) if packed else ((rows, features), torch.float32)
            )
            self.tensors.append(_Tensor(host if packed else into, *_dense(whole), dtype))
        for buffer in made:
            allocate(buffer)
        self.outputs = len(self.tensors)
        operands = {
            role for step in chosen.steps if isinstance(step, Product) for role in (step.out, step.left, step.right)
        }
        operands |= {m.tensor for launch in chosen.launches for m in launch.maps}
        size = 0
        for buffer in chosen.workspace:
            elements = math.prod(extent.value(batch) for extent in buffer.stored)
            bytes_ = -(-elements * DTYPE_BYTES[buffer.dtype] // 256) * 256
            if buffer.role in operands or bytes_ > BORROWED:
                allocate(buffer)
            else:
                self.parts.append((buffer.role, "scratch", size))
                size += bytes_
        # One kernel after the other may use what the stream keeps; several of a plan might have others in between.
        self.borrowed = size if size <= BORROWED and len(chosen.steps) == 1 else 0
        if size and not self.borrowed:
            self.tensors.append(_Tensor("scratch", *_dense((size,)), torch.uint8))
        third = ("offset",) if chosen.keeps_offsets else ()
        third = ("row_count",) if "offset" in inputs else third
        for tensor, roles in ((host, (*_KEPT[:2], *third)), ("sums", _SUMMED)):
            if tensor in inputs:
                self.parts += [(role, tensor, begin + 4 * features * row) for row, role in enumerate(roles)]


@dataclass(frozen=True)
class _Step:
    """A product or a launch, and the memory that only lives around it.

    Attributes:
        born: what is allocated before: place among the tensors, shape, strides, dtype, and (slot, offset) of its parts.
        maps: slot, that of the matrix's address, the maps by address, how the matrix is found, what the map is like.
        run: of the tensors for a product; of the stream and the picked arguments for a launch.
        picked: a launch's arguments, out of the pool; None for a product.
        needed: the slot that is 0 where nobody wants what the launch makes.
        dead: places of the tensors that nobody needs after it.
    """

    born: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, tuple[tuple[int, int], ...]], ...]
    maps: tuple[tuple[int, int, dict[int, Any], Callable[[Sequence[Any]], Tensor], Map], ...]
    run: Callable[..., None]
    picked: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    needed: int
    dead: tuple[int, ...]


class Bound:
    """A plan with its kernels loaded; called with the inputs' tensors and the numbers, in their order.

    The pool of arguments is a list: the addresses of `tensors` (inputs, then what is allocated), addresses inside of
    those, the numbers, the maps, the counters. Each launch picks its arguments out of it. A tensor is allocated before
    the first step that needs it, and let go after the last: the next may lie in its memory.

    `packed`: product and statistics are one tensor `kept` (`unpacked`), an allocation less. Only where no library's
    product has to see the product by itself.

    Attributes:
        outputs, kinds: role of each output; shape and dtype.
    """

    def __init__(self, chosen: Plan, packed: bool = False) -> None:
        inputs = INPUTS[chosen.phase] + (PREPARED if chosen.problem.prepared else ())
        if packed and chosen.phase == "backward":
            inputs = (*inputs[:-2], "kept")
        memory = _Memory(chosen, inputs, packed)
        made = memory.tensors[: memory.outputs]
        self._borrowed, self._inputs, self._made = memory.borrowed, len(inputs), len(memory.tensors)
        self._places = len(memory.parts)
        self.outputs = tuple(t.role for t in made)
        self.kinds = tuple((t.shape, t.dtype) for t in made)
        names = [*inputs, *(t.role for t in memory.tensors), *(["scratch"] if self._borrowed else [])]
        slots = {role: i for i, role in enumerate([*names, *(role for role, _, _ in memory.parts), *SCALARS])}
        slots |= {alias: slots[role] for alias, role in chosen.aliases}
        if "product" in slots:
            slots["stored_product"] = slots["product"]
        slots |= {f"given_{name}": slots[name] for name in ("x", "weight") if name in slots}
        count = len(names) + len(memory.parts) + len(SCALARS)
        constants: list[Any] = [0]  # the address of what is absent, then the numbers that the plan decides
        constants += [value for launch in chosen.launches for _, value in launch.numbers]
        absent, always = count, 0  # where the pool has nothing, and where it always has something: the first input
        next_number, next_map = count + 1, count + len(constants)
        self._constants = (*constants, *(0 for launch in chosen.launches for _ in launch.maps))
        self._counters = chosen.counters
        if chosen.counters:
            slots["counters"] = count + len(self._constants)
            slots["amax_state"] = slots["counters"] + 1
        parts = [(names.index(tensor), len(names) + i, offset) for i, (_, tensor, offset) in enumerate(memory.parts)]
        self._parts = tuple(part for part in parts if not len(inputs) <= part[0] < len(inputs) + self._made)
        owner = {slot: place for place, slot, _ in parts} | {place: place for place in range(len(names))}

        def find(role: str) -> Callable[[Sequence[Any]], Tensor]:
            if slots[role] < len(names):
                return itemgetter(slots[role])
            return lambda tensors: unpacked(tensors[names.index("kept")], chosen.problem)[0]

        steps: list[_Step] = []
        used: list[set[int]] = []  # by each step: places of tensors
        for step in chosen.steps:
            if isinstance(step, Launch):
                own = {role: next_number + i for i, (role, _) in enumerate(step.numbers)}
                own |= {m.role: next_map + i for i, m in enumerate(step.maps)}
                next_number, next_map = next_number + len(step.numbers), next_map + len(step.maps)
                fields = params.layout(step, chosen.problem).fields
                chosen_slots = [own.get(f.name, slots.get(f.role, absent)) for f in fields]
                maps: Any = tuple((own[m.role], slots[m.tensor], {}, find(m.tensor), m) for m in step.maps)
                needed = slots.get(step.only_for, always)
                launcher = driver.Launcher(step, chosen.problem)
                steps.append(_Step((), maps, launcher, itemgetter(*chosen_slots), needed, ()))
                used.append({owner[slot] for slot in (*chosen_slots, needed, *(m[1] for m in maps)) if slot in owner})
            else:
                out, left, right = slots[step.out], slots[step.left], slots[step.right]
                product = _Product(out, left, right, step.transpose_left, step.transpose_right)
                steps.append(_Step((), (), product, None, always, ()))
                used.append({owner[slot] for slot in (out, left, right)})
        self._steps = tuple(self._with_memory(steps, used, memory.tensors, parts))

    def _with_memory(
        self, steps: Sequence[_Step], used: Sequence[set[int]], made: Sequence[_Tensor], parts: Sequence[Any]
    ) -> Iterator[_Step]:
        """`steps`, each with what is `made` before and let go after it; what no step uses is made before the first."""
        first, last = {}, {}
        for place in range(self._inputs, self._inputs + len(made)):
            by = [i for i, places in enumerate(used) if place in places] or [0]
            first[place], last[place] = by[0], by[-1]
        for i, step in enumerate(steps):
            born = tuple(
                (place, t.shape, t.strides, t.dtype, tuple((slot, offset) for p, slot, offset in parts if p == place))
                for place, t in enumerate(made, self._inputs)
                if first[place] == i
            )
            outputs = self._inputs + len(self.outputs)
            dead = tuple(place for place, at in last.items() if at == i and place >= outputs)
            yield replace(step, born=born, dead=dead)

    def __call__(
        self, inputs: tuple[Tensor | None, ...], scalars: tuple[Any, ...], wanted: tuple[bool, ...] | None = None
    ) -> list[Tensor | None]:
        """Run on the current stream of the tensors' device; the outputs (`self.outputs`), None where not `wanted`."""
        first = inputs[0]
        assert first is not None
        index = first.device.index
        if index != driver.current_device():
            with torch.cuda.device(index):
                return self(inputs, scalars, wanted)
        driver.enter(index)
        handle, capturing = driver.stream_handle(index), driver.capturing()
        if self._counters and len(self._steps) > 1 and not capturing:
            with counters(index).in_turn(handle):
                return self._run(inputs, scalars, wanted, index, handle, capturing)
        return self._run(inputs, scalars, wanted, index, handle, capturing)

    def _run(
        self,
        inputs: tuple[Tensor | None, ...],
        scalars: tuple[Any, ...],
        wanted: tuple[bool, ...] | None,
        index: int | None,
        handle: int,
        capturing: bool,
    ) -> list[Tensor | None]:
        empty = driver.empty
        before, tensors = self._inputs, [*inputs, *(None,) * self._made]
        if self._borrowed:  # not by a captured call, which may be replayed beside anything
            tensors.append(empty((self._borrowed,), (1,), torch.uint8) if capturing else scratch(index, handle))
        pool: list[Any] = [0 if t is None else t.data_ptr() for t in tensors]
        pool += (0,) * self._places
        for place, slot, offset in self._parts:
            pool[slot] = pool[place] + offset
        pool += scalars
        pool += self._constants
        if self._counters:
            address, _held = counters(index).take(handle, self._counters, capturing)  # held until the last launch
            pool += (address, address + 4 * (self._counters - 4))
        end = before + len(self.outputs)
        for step in self._steps:
            for place, size, strides, dtype, parts in step.born:
                if wanted is None or place >= end or wanted[place - before]:
                    made = tensors[place] = empty(size, strides, dtype)
                    pool[place] = address = made.data_ptr()
                    del made  # else it would live until the next is there
                    for slot, offset in parts:
                        pool[slot] = address + offset
            if step.picked is None:
                step.run(tensors)
            elif pool[step.needed]:
                for slot, place, known, find, described in step.maps:
                    pool[slot] = known.get(pool[place]) or _make_map(known, find(tensors), described)
                step.run(handle, step.picked(pool))
            for place in step.dead:
                tensors[place] = None
        return tensors[before:end]


@functools.lru_cache(maxsize=4096)
def bind(chosen: Plan, packed: bool = False) -> Bound:
    """`chosen` with its kernels compiled and loaded, remembered. Raises what the compiler or the driver raises."""
    return Bound(chosen, packed)


class _Lasting(dict[Any, Any]):
    """What `make` gives for a key, made once whichever threads ask, and never let go: a kernel may be using it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make, self._lock = make, threading.RLock()

    def __missing__(self, key: Any) -> Any:
        with self._lock:
            if key not in self:
                self[key] = self._make(key)
            return self.get(key)


_scratch = _Lasting(
    lambda key: driver.outside_pools(_device(key[0]), lambda: driver.empty((BORROWED,), (1,), torch.uint8))
)


def scratch(index: int | None, stream: int) -> Tensor:
    """Memory for kernels that keep nothing in it, on one stream of a device; one after the other."""
    found: Tensor = _scratch[index, stream]
    return found


class Counters:
    """Device memory that is zero whenever no kernel runs on it: the kernels leave it as they found it.

    Calls on one stream follow each other (`in_turn`) and share their numbers; a captured call may be replayed at any
    time, beside anything, so it gets numbers of its own for good, or zeros of the graph's where none are left.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_stream: dict[tuple[int, int], int] = {}
        self._blocks: list[Tensor] = []  # all memory that was ever handed out
        self._next, self._end = 0, 0  # addresses: what is left of the newest block
        self._lock = threading.Lock()
        self._turns: dict[int, Any] = {}  # by stream

    @contextlib.contextmanager
    def in_turn(self, stream: int) -> Iterator[None]:
        """Around the launches of one call, of which the numbers go from one to the next: no other call's come between.

        Where the call breaks off, the numbers may not be zero, and the stream gets others.
        """
        with self._turns.setdefault(stream, threading.RLock()):
            try:
                yield
            except BaseException:
                with self._lock:
                    self._by_stream = {key: at for key, at in self._by_stream.items() if key[0] != stream}
                raise

    def take(self, stream: int, count: int, capturing: bool) -> tuple[int, Tensor | None]:
        """The address of at least `count` numbers for a call on `stream`, the current one; what to hold meanwhile."""
        found = None if capturing else self._by_stream.get((stream, count))
        if found is not None:
            return found, None
        with self._lock:
            found, held = self._find(stream, 1 << max(count - 1, 31).bit_length(), capturing)
            if not capturing:
                self._by_stream[stream, count] = found
        return found, held

    def _find(self, stream: int, size: int, capturing: bool) -> tuple[int, Tensor | None]:
        """`take`, where `size` is a power of two: counts up to the same one share their numbers."""
        found = None if capturing else self._by_stream.get((stream, size))
        if found is not None:
            return found, None
        if self._end - self._next < 4 * size:
            if (
                capturing
            ):  # the graph's own memory, which it sets to zero at each replay, and may use again after the call
                held = torch.zeros(size, dtype=torch.int32, device=self._device)
                return held.data_ptr(), held
            numbers = max(size, 1 << 16)
            self._blocks.append(
                driver.outside_pools(self._device, lambda: torch.zeros(numbers, dtype=torch.int32, device=self._device))
            )
            self._next = self._blocks[-1].data_ptr()
            self._end = self._next + 4 * self._blocks[-1].numel()
        found, self._next = self._next, self._next + 4 * size
        if not capturing:
            self._by_stream[stream, size] = found
        return found, None


_counters = _Lasting(lambda index: Counters(_device(index)))


def counters(index: int | None) -> Counters:
    """The counters of the GPU of this index."""
    found: Counters = _counters[index]
    return found


def _device(index: int | None) -> torch.device:
    return torch.device("cpu") if index is None else torch.device("cuda", index)
