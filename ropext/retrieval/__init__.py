"""Whether a model finds in a long text what it is asked for, and any other lm-eval task, on one loaded model."""

from ropext.retrieval.running import check_tasks, effective_lengths, no_task_score, run_tasks, task_names

__all__ = ["check_tasks", "no_task_score", "effective_lengths", "run_tasks", "task_names"]
