"""Memory that the GPUs of a process group map of each other, on one host, and what ranks exchange through it.

A collective of `torch.distributed` takes the host 25 to 60 µs, a launch of `exchange.cuh` 10 to 20 (docs/ranks.md).
Whether a group can do so is asked once, of all its ranks together (`reserve`): they have to be processes of one host
with a GPU each, whose memory the others can map. Else collectives serve.

The memory stays as long as the process: a captured graph may use it, and so may other ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..plan import Chip, Plan
from ..plan import ranks as plan
from . import binding, call, driver
from .settings import variable

# Numbers that the memory of a group holds at least, and at most: beyond it a collective, of more blocks, is faster.
_LEAST, _MOST = 1 << 15, 1 << 17
_MOST_RANKS = 16  # whose addresses a thread holds in registers
_PAGE = 2 << 20  # bytes that the driver maps at once
_DIGEST = 16  # bytes that stand for the name of a host or a GPU
_NO_SCALARS = (0, 0.0, 0.0, 0.0, 0, 0, 0)


class Peers:
    """Exchanges of float32 tensors of up to `capacity` numbers between the ranks whose memory is at `addresses`.

    They follow each other on the device, whichever stream a call is on; a captured one goes where its graph goes.

    Attributes:
        addresses: where each rank's memory is, int64 [ranks].
    """

    def __init__(
        self, device: torch.device, chip: Chip, addresses: Sequence[int], rank: int, capacity: int, limit_ms: int
    ) -> None:
        self._device, self._chip, self._ranks, self._rank = device, chip, len(addresses), rank
        self._capacity, self._limit_ms = capacity, limit_ms
        self.addresses = driver.outside_pools(device, lambda: torch.tensor(addresses, device=device))
        self._bound: dict[Any, binding.Bound] = {}
        self._stream: int | None = None
        self._last: Any = None

    def gather(self, row: Tensor) -> Tensor:
        """`row` [n] of every rank [ranks, n]."""
        return self._exchange(row, False)

    def add_up(self, sums: Tensor) -> Tensor:
        """The sum over all ranks, in their order: the same bits on each."""
        return self._exchange(sums, True)

    def _exchange(self, sent: Tensor, adds_up: bool) -> Tensor:
        bound = self._bound.get((sent.shape, adds_up))
        if bound is None:
            bound = self._bound[sent.shape, adds_up] = binding.bind(self.plan(tuple(sent.shape), adds_up))
        self.follow()
        (received,) = bound([sent.contiguous(), self.addresses], _NO_SCALARS)
        assert received is not None
        return received

    def plan(self, shape: tuple[int, ...], adds_up: bool) -> Plan:
        """That of an exchange of tensors of one shape."""
        return plan.exchange(self._chip, shape, self._capacity, self._ranks, self._rank, self._limit_ms, adds_up)

    def follow(self) -> None:
        """What the current stream is given from now on comes after the exchanges so far. Before each exchange."""
        stream = driver.stream_handle(self._device.index)
        if stream != self._stream and not driver.capturing():
            current = torch.cuda.current_stream(self._device)
            if self._last is not None:
                current.wait_stream(self._last)
            self._stream, self._last = stream, current


# By group, device and capacity; None where collectives serve. All ranks have the same keys, because they ask together,
# and each knows by the numbers alone which entry an exchange belongs to.
_known: dict[tuple[Any, torch.device, int], Peers | None] = {}


def _capacity(count: int) -> int:
    """Of the memory for so many numbers; the same for 2·O + 1, which a forward sends, and 2·O, of a backward."""
    return max(_LEAST, 1 << (count // 2 * 2).bit_length())


def find(group: Any, sent: Tensor) -> Peers | None:
    """Who exchanges tensors like `sent` in a process group; None where collectives do."""
    return of_count(group, sent.device, sent.numel()) if sent.dtype == torch.float32 else None


def of_count(group: Any, device: torch.device, count: int) -> Peers | None:
    """Who exchanges so many numbers of float32."""
    return _known.get((group, device, _capacity(count)))


def reserve(
    group: Any,
    rank: int,
    ranks: int,
    device: torch.device,
    count: int,
    gather: Callable[[Tensor], Tensor],
    limit_ms: int,
) -> None:
    """Prepare for exchanges of `count` numbers in a process group: all ranks together, once for each size of memory.

    Where GEMMNORM_PEERS=0 is set on any rank, collectives go on serving.

    Args:
        gather: a tensor [n] of every rank [ranks, n], by the group's own collective.
        limit_ms: how long ranks wait for each other in an exchange.
    """
    key = (group, device, _capacity(count))
    if key in _known or key[2] > _MOST:
        return
    chip = call.chip(device)
    if chip is None and device.type != "cuda":  # a rank whose GPU lacks a compiler answers for the others' sake
        return

    def ask(said: bytes) -> list[bytes]:
        return [bytes(row) for row in gather(torch.tensor([*said], dtype=torch.uint8, device=device)).tolist()]

    serves = chip is not None and ranks <= _MOST_RANKS and variable("GEMMNORM_PEERS") != "0"
    addresses = _agreed(serves, rank, ranks, device.index, plan.exchange_bytes(key[2], ranks), ask)
    _known[key] = Peers(device, chip, addresses, rank, key[2], limit_ms) if chip and addresses else None


def _agreed(
    serves: bool, rank: int, ranks: int, index: int, size: int, ask: Callable[[bytes], list[bytes]]
) -> list[int]:
    """Where each rank's memory of `size` bytes is, as this one maps it; empty where any rank does not reach all.

    Behind those bytes each rank writes its number, on all others: whether it arrives shows whether they can be written.
    """

    def offer(make: Callable[[], bytes]) -> list[bytes]:
        """What `make` gives on each rank; empty where it fails on any."""
        said = b""
        with contextlib.suppress(Exception):  # no memory; a driver or a container that shares none
            said = make()
        return answers if all(map(any, answers := ask(said.ljust(driver.HANDLE, b"\0")))) else []

    places = offer(lambda: b"".join(map(_digest, driver.place(index))) if serves else b"")
    hosts, gpus = ({place[i : i + _DIGEST] for place in places} for i in (0, _DIGEST))
    if len(hosts) != 1 or len(gpus) < ranks:
        return []
    own: list[int] = []

    def share() -> bytes:
        address, handle = driver.shared_memory(index, -(-(size + 4 * ranks) // _PAGE) * _PAGE)
        own.append(address)
        return handle

    handles = offer(share)
    addresses: list[int] = []

    def reach() -> bytes:
        for r, handle in enumerate(handles):
            mapped = own[0] if r == rank else driver.open_shared_memory(index, handle)
            addresses.append(mapped)
            driver.write_word(index, mapped + size + 4 * rank, rank + 1)
        return b"\1"

    def arrived() -> bytes:
        return bytes([all(driver.read_word(index, own[0] + size + 4 * r) == r + 1 for r in range(ranks))])

    agreed = bool(handles) and bool(offer(reach)) and bool(offer(arrived))
    return addresses if agreed else []


def _digest(name: str) -> bytes:
    return hashlib.blake2s(name.encode(), digest_size=_DIGEST).digest()
