"""What stands ready before the first step: the model and its optimizer in Accelerate, rows that it can take, a bar."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext.errors import Refused, UsageError
from ropext.feed import UNSCORED, Batch, Feed
from ropext.jumps import check_packing, check_skipping
from ropext.loss import as_loss
from ropext.process import Team
from ropext.score import has_changing_table
from ropext.training import Settings

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from rich.progress import Progress

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.([0-9]+)\.")
BETAS = (0.9, 0.95)  # with no weight decay, as in PI (arXiv:2306.15595, section 3.1)


def check_tracker(name: str) -> None:
    """Raises UsageError for a tracker that Accelerate does not know, or whose package is not here."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    here = sorted(str(tracker) for tracker in get_available_trackers())
    if name not in here:
        known = sorted(str(tracker) for tracker in LOGGER_TYPE_TO_CLASS)
        found = f"{name!r}, whose package is not installed" if name in known else repr(name)
        raise UsageError(f"--tracker is one of {', '.join(here)} here: found {found}")


def wait_for_log_order(logs: Path) -> None:
    """Lets a second pass where an event file of this second is there: TensorBoard reads the files of a run in order of
    their names, which tell second and process, so those of a quickly resumed run could come before what they continue.
    """
    seconds = [int(found[1]) for file in logs.rglob("*") if (found := _EVENT_FILE.match(file.name))]
    while seconds and int(time.time()) <= max(seconds):
        time.sleep(0.05)


def check_feeds(model: Any, feeds: Sequence[Feed]) -> None:
    """Raises an error where the model's code would make something else of the feeds' positions."""
    if any(feed.packed for feed in feeds):
        check_packing(model)
    if any(feed.skips for feed in feeds):
        if has_changing_table(model.config):
            raise Refused(
                "positions are skipped for a static rotary table: one that changes with the input's length (dynamic, "
                "longrope) would follow the largest position of each batch. Leave out --pose, or patch by ntk or yarn"
            )
        check_skipping(model)


def prepare(
    model: Any, settings: Settings, run_folder: Path, team: Team
) -> tuple[Accelerator, Any, torch.optim.Optimizer]:
    """Accelerate's view of the loss of a model and of its optimizer, in float32, logging to TensorBoard.

    Raises Refused where processes would not train together, or not as they were asked to.
    """
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, ProjectConfiguration, set_seed

    assert all(p.dtype == torch.float32 for p in model.parameters()), "master weights are float32: load_model does that"
    folders = ProjectConfiguration(project_dir=str(run_folder), logging_dir=str(run_folder / "logs"))
    accelerator = Accelerator(
        cpu=model.device.type == "cpu", mixed_precision="no", log_with=settings.tracker, project_config=folders
    )
    seen = accelerator.num_processes
    if seen != team.size:
        raise Refused(f"all processes of a launch train one model: found {team.size}, of which Accelerate sees {seen}")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and accelerator.distributed_type != DistributedType.FSDP:
        found = accelerator.distributed_type.value
        raise Refused(
            f"FSDP was asked for, and Accelerate would run {found}: on a CPU it drops FSDP in silence. Use GPUs, or "
            "leave FSDP out of the configuration"
        )
    parallelism = accelerator.parallelism_config
    if parallelism is not None and (parallelism.cp_size > 1 or parallelism.sp_size > 1):
        count = parallelism.cp_size * parallelism.sp_size
        raise Refused(f"context parallelism is not built yet: found {count} processes to a row; leave it out")
    set_seed(settings.seed, device_specific=team.size > 1)  # for dropout, where a model has it
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.peak_rate, betas=BETAS, weight_decay=0.0, fused=True)
    loss, optimizer = accelerator.prepare(as_loss(model), optimizer)
    return accelerator, loss, optimizer


def share(batch: Batch, team: Team) -> Batch:
    """The rows of one process: as many for each, so where rows are missing some that score nothing."""
    import numpy as np

    rows = np.arange(team.rank, -(-len(batch.ids) // team.size) * team.size, team.size)
    labels = batch.labels[rows % len(batch.ids)]
    labels[rows >= len(batch.ids)] = UNSCORED
    rows %= len(batch.ids)
    return replace(
        batch, ids=batch.ids[rows], labels=labels, positions=None if batch.positions is None else batch.positions[rows]
    )


def switch_checkpointing(model: Any, on: bool) -> None:
    """Gradient checkpointing on or off."""
    # transformers renamed both within its version 5; the older names now warn.
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{word}_checkpointing_disable")()


def progress_bar(shown: bool, tokens: int) -> Progress:
    """A bar on stderr over the tokens of all stages; lines that others print meanwhile go above it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f}%"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    bar = Progress(
        *columns,
        console=Console(stderr=True),
        disable=not shown,
        refresh_per_second=2,
        speed_estimate_period=600.0,  # seconds; one step of a large model can take longer than the default of 30
        redirect_stdout=sys.stdout.isatty(),  # a redirected stdout holds what was asked for, not the bar's lines
    )
    bar.add_task("", total=tokens, figures="")
    return bar
