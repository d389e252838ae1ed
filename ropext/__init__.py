"""ropext makes the context of a Hugging Face RoPE checkpoint longer, and measures what that gained and cost."""

__version__ = "0.1.0"

from ropext.api import patch  # noqa: E402  (provenance reads the version while api is imported)

__all__ = ["__version__", "patch"]
