"""The memory that an `EnvPool` shares with its workers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IDLE, RESET, STEP = 0, 1, 2  # commands
RUNNING, TERMINATED, TRUNCATED = 0, 1, 2
ERROR_BYTES = 4096


@dataclass(frozen=True)
class Arrays:
    """What parent and workers share; every field is a view into one anonymous file."""

    commands: npt.NDArray[np.uint8]  # [n] IDLE, RESET or STEP
    seeds: npt.NDArray[np.int64]  # [n] for RESET
    actions: npt.NDArray[np.float32]  # [n, A] for STEP, in [-1, 1]
    observations: npt.NDArray[np.float32]  # [n, S]
    rewards: npt.NDArray[np.float64]  # [n]
    costs: npt.NDArray[np.float64]  # [n]
    ended: npt.NDArray[np.uint8]  # [n] RUNNING, TERMINATED or TRUNCATED
    current: npt.NDArray[np.int64]  # [w] the slot that a worker is busy with, or -1
    beats: npt.NDArray[np.int64]  # [w] operations done since the worker started
    errors: npt.NDArray[np.uint8]  # [w, ERROR_BYTES] what a worker raised


def _layout(sizes: Sequence[int]) -> tuple[list[tuple[Any, tuple[int, ...], int]], int]:
    """(dtype, shape, offset) of each of the Arrays, and the bytes they need in all."""
    n, w, s, a = sizes  # slots, workers, observation_dim, action_dim
    rows: list[tuple[Any, tuple[int, ...], int]] = []
    offset = 0
    for dtype, shape in (
        (np.uint8, (n,)),
        (np.int64, (n,)),
        (np.float32, (n, a)),
        (np.float32, (n, s)),
        *((np.float64, (n,)),) * 2,
        (np.uint8, (n,)),
        *((np.int64, (w,)),) * 2,
        (np.uint8, (w, ERROR_BYTES)),
    ):
        rows.append((dtype, shape, offset))
        offset += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64  # whole cache lines
    return rows, offset


def size_of(sizes: Sequence[int]) -> int:
    """The bytes that Arrays of (slots, workers, observation_dim, action_dim) need."""
    return _layout(sizes)[1]


def share(fd: int, sizes: Sequence[int]) -> Arrays:
    """The Arrays in the file `fd`."""
    layout, size = _layout(sizes)
    buffer = mmap.mmap(fd, size)
    return Arrays(*(np.ndarray(shape, dtype, buffer, offset) for dtype, shape, offset in layout))
