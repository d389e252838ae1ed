"""Norms by layer while a model trains: of what each layer gives, and of the gradients of its parameters.

A layer that explodes or gives NaN is then known by name, not only the loss that it spoils.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

EXPLODED = 1000.0  # times the median norm of the steps before
REMEMBERED = 20  # of those steps


class Watch:
    """The decoder layers of a model and what else it has, by name, in the order of the forward pass."""

    def __init__(self, model: Any) -> None:
        from torch.nn import ModuleList

        lists = [(name, module) for name, module in model.named_modules() if isinstance(module, ModuleList)]
        path, layers = max(lists, key=lambda found: len(found[1]), default=("", []))
        self.layers: dict[str, nn.Module] = {f"layer_{number:02}": layer for number, layer in enumerate(layers)}
        self.parts: dict[str, list[nn.Parameter]] = {"before": [], **{name: [] for name in self.layers}, "after": []}
        inside = {id(p): name for name, layer in self.layers.items() for p in layer.parameters()}
        embeddings = {id(p) for p in model.get_input_embeddings().parameters()}
        for parameter in model.parameters():
            where = inside.get(id(parameter), "before" if id(parameter) in embeddings else "after")
            if parameter.requires_grad:
                self.parts[where].append(parameter)
        self.given: dict[str, Tensor] = {}  # root mean square of what each layer gave last
        self.norms: list[float] = []  # of the whole gradient, in the steps before

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Notes what each layer gives in the forward passes inside."""

        def note(name: str) -> Any:
            def hook(module: object, inputs: object, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                self.given[name] = hidden.detach().float().square().mean().sqrt()

            return hook

        handles = [layer.register_forward_hook(note(name)) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def figures(self) -> dict[str, float]:
        """After a backward pass: root mean square of activations and norm of gradients, by layer."""
        import torch

        found = dict(self.given)
        gradients = {}
        for name, parameters in self.parts.items():
            norms = [_whole(p.grad.norm()) for p in parameters if p.grad is not None]
            if norms:
                gradients[name] = torch.stack(norms).norm()
        tags = [f"activation_rms/{name}" for name in found] + [f"gradient_norm/{name}" for name in gradients]
        tensors = [*found.values(), *gradients.values()]
        return dict(zip(tags, torch.stack([t.float() for t in tensors]).tolist(), strict=True)) if tensors else {}

    def broken(self, figures: dict[str, float], loss: float, norm: float) -> str | None:
        """What is wrong with a step, with the layer where it shows first; None where nothing is."""
        if math.isfinite(loss) and math.isfinite(norm):
            median = sorted(self.norms)[len(self.norms) // 2] if len(self.norms) >= REMEMBERED // 4 else math.inf
            if norm <= EXPLODED * median:
                self.norms = [*self.norms, norm][-REMEMBERED:]
                return None
            worst = max((tag for tag in figures if tag.startswith("gradient_norm/")), key=lambda tag: figures[tag])
            return (
                f"the gradient norm is {norm:.4g}, {norm / median:.3g} times its median, most of it in {_name(worst)}"
            )
        spoiled = [tag for tag, value in figures.items() if not math.isfinite(value)]
        given = [tag for tag in spoiled if tag.startswith("activation_rms/")]
        where = given[:1] or spoiled[-1:]  # forward the first, backward the last is where it began
        return f"the loss is {loss}, the gradient norm {norm}" + (f", first in {_name(where[0])}" if where else "")


def _whole(norm: Any) -> Tensor:
    """A norm of a parameter that several processes share in parts, or one of a whole parameter."""
    gathered: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return gathered


def _name(tag: str) -> str:
    kind, name = tag.split("/")
    where = {"before": "the embeddings", "after": "the final norm or the head"}.get(name, name.replace("_", " "))
    return f"{where} ({kind.replace('_', ' ')})"
