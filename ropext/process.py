"""The process itself: which others it works with, how it is interrupted, what memory it held. Sizes in bytes."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ropext.errors import RopextError

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


def forget_peak(device: torch.device) -> None:
    """Start the GPU's peak anew; a CPU's cannot be."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """GPU: the peak of PyTorch's allocator. CPU: the most resident memory that the process held since it began."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts in bytes there, elsewhere in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """The processes of one launch, which all run the same program; each knows its own number."""

    rank: int = 0
    size: int = 1
    device: str | None = None  # that the launch gave this process

    def gather(self, value: Value) -> list[Value]:
        """The value of each process, by rank, in all of them. Waits for all."""
        if self.size == 1:
            return [value]
        from torch import distributed

        found: list[Value | None] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found  # type: ignore[return-value]  # each place is filled

    def first(self, value: Value) -> Value:
        """The first process's value, in all of them."""
        return self.gather(value)[0]


ALONE = Team()


def join_team(device: str | None) -> Team:
    """The processes that torchrun or `accelerate launch` started, connected by Accelerate; ALONE without a launcher.

    Raises RopextError where they do not see each other: each would believe that it is alone, and all would write.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched == 1:
        return ALONE
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or device is None and not torch.cuda.is_available())
    if state.num_processes != launched:
        raise RopextError(
            f"the processes of a launch must see each other: {launched} were started, Accelerate sees "
            f"{state.num_processes}. Start them with torchrun, or without a GPU with accelerate launch --cpu"
        )
    return Team(rank=state.process_index, size=launched, device=str(state.device))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice: PyTorch has a class of its own for it only on a GPU."""
    import torch

    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        phrase in said for phrase in ("not enough memory", "out of memory", "can't allocate memory")
    )


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Warnings of this logger off, and afterwards as they were."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Interrupt:
    """Whether the user (Ctrl-C) or the system (SIGTERM) has asked the process to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def stop(self) -> None:
        """End the process as it was asked to. Raises KeyboardInterrupt, or SystemExit with the signal's usual code."""
        if self.signal == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt


@contextmanager
def first_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C and SIGTERM are noted, so that a step is never left half done; a second one stops at once.

    Where Python itself would not stop (another thread, a signal that is ignored or handled) nothing is changed.
    """
    asked = Interrupt()
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ours = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread():
        ours = []

    def first(number: int, frame: object) -> None:
        asked.signal = number
        for one in ours:
            signal.signal(one, usual[one])
        os.write(2, b"\nstopping at the end of this step, with the state saved; once more stops at once\n")

    for number in ours:
        signal.signal(number, first)
    try:
        yield asked
    finally:
        for number in ours:
            signal.signal(number, usual[number])
