"""ropext makes the context of a Hugging Face RoPE checkpoint longer, and measures what that gained and cost."""

from typing import TYPE_CHECKING, Any

from ropext.version import __version__

if TYPE_CHECKING:
    from ropext.api import check, evaluate, finetune, patch, patch_model, revert, show_checkpoint

__all__ = ["__version__", "check", "evaluate", "finetune", "patch", "patch_model", "revert", "show_checkpoint"]


def __getattr__(name: str) -> Any:
    """The public functions, imported when first asked for: the command line's help does without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ropext import api

    return getattr(api, name)
