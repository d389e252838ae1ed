"""The training process itself: that it is alone, how it is interrupted, and how much memory it held. Sizes in bytes."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ropext.errors import Refused

if TYPE_CHECKING:
    import torch


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


def refuse_many_processes() -> None:
    """Before Accelerate joins the others: each would believe that it is alone, and all would write."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise one_process(world)


def one_process(found: int) -> Refused:
    """The refusal of more than one process."""
    return Refused(f"finetune trains in one process for now: found {found}; start it without torchrun or a launcher")


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


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is never left half done; a second one interrupts at once.

    Where Python itself would not raise KeyboardInterrupt (another thread, SIGINT ignored) nothing is changed.
    """
    interrupted = threading.Event()
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield interrupted
        return

    def first(number: int, frame: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)
        os.write(2, b"\nstopping at the end of this step, with the state saved; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, first)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)
