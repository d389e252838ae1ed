"""Whether a model finds in a long text what it is asked for, and any other lm-eval task, on one loaded model."""

from ropext.retrieval.running import effective_lengths, run_tasks, task_names

__all__ = ["effective_lengths", "run_tasks", "task_names"]
