"""A plan bound to its loaded kernels: what a call allocates, and where each kernel argument comes from.

Everything that the plan alone decides is worked out once (`bind`), so that a call is a few allocations, one list of
addresses, and the launches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..plan import PREPARED, Launch, Map, Plan, Problem, params
from . import driver
from .memory import BORROWED, Made, Memory, unpacked

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
    "exchange": ("sent", "peers"),
}  # fmt: skip
SCALARS = ("scale_stride", "scale_value", "momentum", "eps", "batch", "features", "in_features")
_KEPT_ARGUMENTS = 256  # of a launch, by addresses: about a kilobyte each


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


def scalars(problem: Problem, scale: Tensor | None, scale_value: float, momentum: float, eps: float) -> tuple[Any, ...]:
    """The numbers of `SCALARS`."""
    stride = 0 if scale is None or scale.numel() < problem.out_features else 1
    numbers = (float(np.float32(number)) for number in (scale_value, momentum, eps))
    return (stride, *numbers, problem.batch, problem.out_features, problem.in_features)


class _Packed(dict[Any, Any]):
    """A launch's packed arguments by what decides them, once that has come twice: some addresses never come again."""

    def __init__(self) -> None:
        super().__init__()
        self._once: set[int] = set()

    def keep(self, key: Any, packed: Any) -> None:
        kept: Any = self if (seen := hash(key)) in self._once else self._once
        if len(kept) >= _KEPT_ARGUMENTS:
            kept.clear()
        if kept is self:
            self[key] = packed
        else:
            self._once.add(seen)


@dataclass(frozen=True)
class _Step:
    """A product or a launch, and the memory that only lives around it.

    Attributes:
        run: of the tensors for a product; of the stream and the packed arguments for a launch.
        only_for: of a launch, which output: left out where nobody wants that.
        born: what is allocated before: place among the tensors, the output that it is or is for, shape, strides, dtype.
        dead: places of the tensors that nobody needs after it.
        picked: a launch's arguments, out of the pool; None for a product.
        offsets: which of those are inside of a tensor, and how many bytes.
        maps: which of those are maps; place of the matrix, maps by address, how it is found, what the map is like.
        key: what decides a launch's arguments, out of the addresses: those that it uses, and the numbers.
        packed: the arguments by `key`.
    """

    run: Any
    only_for: int | None = None
    born: tuple[tuple[int, int | None, tuple[int, ...], tuple[int, ...], torch.dtype], ...] = ()
    dead: tuple[int, ...] = ()
    picked: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
    offsets: tuple[tuple[int, int], ...] = ()
    maps: tuple[tuple[int, int, dict[int, Any], Callable[[Sequence[Any]], Tensor], Map], ...] = ()
    key: Callable[[Sequence[Any]], Any] | None = None
    packed: _Packed = field(default_factory=_Packed)


class Bound:
    """A plan with its kernels loaded; called with the inputs' tensors and the numbers, in their order.

    A call makes a list of the addresses of its tensors: inputs, what is allocated, what the stream lends. They decide
    the arguments of each launch, which are kept by them: the steps of a training come back to the same addresses. Where
    they are new, a launch picks its arguments out of a pool: the addresses, the numbers, what the plan decides. A
    tensor is allocated before the first step that needs it, and let go after the last: the next may lie in its memory.
    So are the inputs, whose list the call takes over.

    `packed`: product and statistics are one tensor `kept` (`unpacked`), an allocation less. Only where no library's
    product has to see the product by itself.

    Attributes:
        outputs, kinds: role of each output; shape and dtype.
    """

    def __init__(self, chosen: Plan, packed: bool = False) -> None:
        inputs = INPUTS[chosen.phase] + (PREPARED if chosen.problem.prepared else ())
        if any("peers" in launch.params for launch in chosen.launches) and "peers" not in inputs:
            inputs = (*inputs, "peers")  # ranks exchange in between (`runtime.ranks`)
        if packed and chosen.phase == "backward":
            inputs = (*inputs[:-2], "kept")
        memory = Memory(chosen, inputs, packed)
        made = memory.tensors[: memory.outputs]
        self._borrowed, self._inputs, made_later = memory.borrowed, len(inputs), len(memory.tensors)
        self._unmade, self._nowhere = (None,) * made_later, (0,) * made_later
        self.outputs = tuple(t.role for t in made)
        self.kinds = tuple((t.shape, t.dtype) for t in made)
        names = [*inputs, *(t.role for t in memory.tensors), *(["scratch"] if self._borrowed else [])]
        parts = memory.parts
        self._counters = chosen.counters
        if chosen.counters:
            names.append("counters")
            parts.append(("amax_state", "counters", 4 * (chosen.counters - 4)))
        slots = {role: (i, 0) for i, role in enumerate([*names, *SCALARS])}  # in the pool, and bytes behind that
        slots |= {role: (names.index(tensor), offset) for role, tensor, offset in parts}
        slots |= {alias: slots[role] for alias, role in chosen.aliases}
        if "product" in slots:
            slots["stored_product"] = slots["product"]
        slots |= {f"given_{name}": slots[name] for name in ("x", "weight") if name in slots}
        absent = len(names) + len(SCALARS)
        constants: list[Any] = [0]  # the address of what is absent, then the numbers that the plan decides
        kept = slots["kept"][0] if packed else None

        def find(role: str) -> Callable[[Sequence[Any]], Tensor]:
            if slots[role][0] != kept:
                return itemgetter(slots[role][0])
            return lambda tensors: unpacked(tensors[kept], chosen.problem)[0]

        output = {role: i for i, role in enumerate(self.outputs)}
        steps: list[_Step] = []
        used: list[set[int]] = []  # by each step: places of tensors
        for step in chosen.steps:
            if isinstance(step, Launch):
                own = {role: (absent + len(constants) + i, 0) for i, (role, _) in enumerate(step.numbers)}
                constants += [value for _, value in step.numbers]
                fields = params.layout(step, chosen.problem).fields
                picked = [own.get(f.name, slots.get(f.role, (absent, 0))) for f in fields]
                at = {f.name: i for i, f in enumerate(fields)}
                maps: Any = tuple((at[m.role], slots[m.tensor][0], {}, find(m.tensor), m) for m in step.maps)
                places = {slot for slot, _ in picked if slot < len(names)} | {place for _, place, *_ in maps}
                launch = _Step(
                    driver.Launcher(step, chosen.problem),
                    output.get(step.only_for),
                    picked=itemgetter(*(slot for slot, _ in picked)),
                    offsets=tuple((i, offset) for i, (_, offset) in enumerate(picked) if offset),
                    maps=maps,
                    key=itemgetter(*places, len(names)),  # the numbers follow the addresses
                )
                steps.append(launch)
                used.append(places)
            else:
                (out, _), (left, _), (right, _) = slots[step.out], slots[step.left], slots[step.right]
                steps.append(_Step(_Product(out, left, right, step.transpose_left, step.transpose_right)))
                used.append({out, left, right})
        self._constants = tuple(constants)
        self._steps = tuple(self._with_memory(steps, used, memory.tensors))

    def _with_memory(self, steps: Sequence[_Step], used: Sequence[set[int]], made: Sequence[Made]) -> Iterator[_Step]:
        """`steps`, each with what is `made` before and let go after it; what no step uses is made before the first."""
        first, last = {}, {}
        for place in range(self._inputs + len(made)):
            by = [i for i, places in enumerate(used) if place in places] or [0]
            first[place], last[place] = by[0], by[-1]
        output = {role: i for i, role in enumerate(self.outputs)}
        outputs = range(self._inputs, self._inputs + len(output))
        for i, step in enumerate(steps):
            born = tuple(
                (place, output.get(t.only_for or t.role), t.shape, t.strides, t.dtype)
                for place, t in enumerate(made, self._inputs)
                if first[place] == i
            )
            dead = tuple(place for place, at in last.items() if at == i and place not in outputs)
            yield replace(step, born=born, dead=dead)

    def __call__(
        self, inputs: list[Tensor | None], scalars: tuple[Any, ...], wanted: tuple[bool, ...] | None = None
    ) -> list[Tensor | None]:
        """Run on the current stream of the tensors' device; the outputs (`self.outputs`), None where not `wanted`."""
        assert inputs[0] is not None
        index = inputs[0].device.index
        if index != driver.current_device():
            with torch.cuda.device(index):
                return self(inputs, scalars, wanted)
        driver.enter(index)
        handle, capturing = driver.stream_handle(index), driver.capturing()
        if self._counters and not capturing:
            with counters(index).in_turn(handle):
                return self._run(inputs, scalars, wanted, index, handle, capturing)
        return self._run(inputs, scalars, wanted, index, handle, capturing)

    def _run(
        self,
        tensors: list[Tensor | None],
        scalars: tuple[Any, ...],
        wanted: tuple[bool, ...] | None,
        index: int | None,
        handle: int,
        capturing: bool,
    ) -> list[Tensor | None]:
        empty, before = driver.empty, self._inputs
        addresses: list[Any] = [0 if t is None else t.data_ptr() for t in tensors]
        tensors += self._unmade
        addresses += self._nowhere
        if self._borrowed:  # not by a captured call, which may be replayed beside anything
            lent = empty((self._borrowed,), (1,), torch.uint8) if capturing else scratch(index, handle)
            tensors.append(lent)
            addresses.append(lent.data_ptr())
        if self._counters:
            address, _held = counters(index).take(handle, self._counters, capturing)  # held until the last launch
            addresses.append(address)
        addresses.append(scalars)
        for step in self._steps:
            for place, whose, size, strides, dtype in step.born:
                if wanted is None or whose is None or wanted[whose]:
                    made = tensors[place] = empty(size, strides, dtype)
                    addresses[place] = made.data_ptr()
                    del made  # else it would live until the next is there
            if wanted is None or step.only_for is None or wanted[step.only_for]:
                if step.key is None:
                    step.run(tensors)
                else:
                    key = step.key(addresses)
                    packed = step.packed.get(key)
                    if packed is None:
                        packed = self._pack(step, tensors, addresses)
                        step.packed.keep(key, packed)
                    step.run(handle, packed)
            for place in step.dead:
                tensors[place] = None
        return tensors[before : before + len(self.outputs)]

    def _pack(self, step: _Step, tensors: Sequence[Tensor | None], addresses: Sequence[Any]) -> Any:
        """The arguments of a launch whose addresses are new."""
        *pool, numbers = addresses
        pool += numbers
        pool += self._constants
        assert step.picked is not None
        values = [*step.picked(pool)]
        for i, offset in step.offsets:
            if values[i]:
                values[i] += offset
        for i, place, known, find, described in step.maps:
            values[i] = known.get(pool[place]) or _make_map(known, find(tensors), described)
        return step.run.pack(*values)


@functools.lru_cache(maxsize=4096)
def bind(chosen: Plan, packed: bool = False) -> Bound:
    """`chosen` with its kernels compiled and loaded, remembered. Raises what the compiler or the driver raises.

    Kernels do not lie in PyTorch's memory: where none is left for them, PyTorch gives back what it keeps and does not
    use, and they are loaded once more.

    Raises:
        torch.cuda.OutOfMemoryError: it does not suffice. That says nothing about the next call, and is not remembered.
    """
    try:
        with driver.memory_errors():
            return Bound(chosen, packed)
    except torch.cuda.OutOfMemoryError:
        if driver.capturing():
            raise
    torch.cuda.empty_cache()
    with driver.memory_errors():
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


class _Turn:
    """A stream's turn. Where a call breaks off, its numbers may not be zero, and the stream gets others."""

    __slots__ = ("_counters", "_lock", "_stream")

    def __init__(self, counters: Counters, stream: int) -> None:
        self._counters, self._stream, self._lock = counters, stream, threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._counters.forget(self._stream)
        self._lock.release()


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
        self._turns: dict[int, _Turn] = {}  # by stream

    def in_turn(self, stream: int) -> _Turn:
        """Around the launches of a call: no other call's come between, which would change numbers that go on."""
        found = self._turns.get(stream)
        return self._turns.setdefault(stream, _Turn(self, stream)) if found is None else found

    def forget(self, stream: int) -> None:
        """The stream gets other numbers."""
        with self._lock:
            self._by_stream = {key: at for key, at in self._by_stream.items() if key[0] != stream}

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
