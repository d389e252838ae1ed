"""LoRA through peft: low-rank updates of the linear layers, with norms and embeddings trained in full.

Low-rank updates alone do not learn a longer context: Llama 2 7B at 32k comes to a perplexity of 11.4 to 12.0 at any
rank, to 8.12 with norms and embeddings, to 8.08 with everything trained (LongLoRA, Chen et al. 2023, arXiv:2309.12307,
section 3.3). The model stays the transformers model that it was, its linear layers wrapped in place. Its norms and
embeddings train in place too: peft's modules_to_save would hold each of them twice, and part what is tied. Only the
file that is written is peft's, for stock peft to load.

Shapes: I inputs and O outputs of a linear layer, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ropext.checkpoint import CONFIG, RECORD, SCHEMA, Checkpoint, read_json
from ropext.errors import Refused, short
from ropext.facts import positions_of, read_facts
from ropext.rope import ORIGINAL
from ropext.staging import staged
from ropext.version import __version__
from ropext.write import check_destination, json_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's names
# A config.json beside the adapter itself would have transformers look for a whole model there, not for the base.
BASE_CONFIG = "base_config"
_NAME = "default"  # peft's own name of an adapter; no file holds it
_PREFIX = "base_model.model."  # of each tensor in an adapter file
_KIND = "adapter"  # in ropext.json

Model = TypeVar("Model", bound="nn.Module")


def add_lora(
    model: Model, rank: int, *, alpha: float | None = None, train_norms_and_embeddings: bool = True, seed: int = 0
) -> Model:
    """Freeze a float32 causal model and wrap each linear layer but the head: W x becomes W x + alpha / rank * B A x,
    A `[R, I]` random from `seed`, B `[O, R]` zero. Returns the same model, whose outputs are as before.

    All linear layers of the blocks, for that is what matches full tuning (QLoRA, Dettmers et al. 2023,
    arXiv:2305.14314, section 4); LongLoRA adapts those of attention alone. `alpha` is 2 * rank unless stated, as there.
    With `train_norms_and_embeddings`, norms, input embeddings and output head train too; what is tied stays tied.

    Raises Refused for what LoRA cannot do, or is not built here.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from torch import nn

    alpha = 2 * rank if alpha is None else alpha
    _check(model, rank, alpha)
    head = _head(model)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if not linear:
        raise Refused(f"LoRA adapts linear layers: {type(model).__name__} has none besides its head. Leave out --lora")
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=linear, task_type="CAUSAL_LM")  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # A is made on the CPU; the random states of GPUs stay as they are
        inject_adapter_in_model(config, model, _NAME)
    if train_norms_and_embeddings:
        for module in _norms_and_embeddings(model):
            module.requires_grad_(True)
    return model


def trained_parameters(model: nn.Module) -> int:
    """How many numbers of a model take gradients and optimizer state."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged_state(model: nn.Module) -> Mapping[str, Tensor]:
    """The parameters of the plain model under their plain names, low-rank updates added; `model` stays as it is.

    Each is computed when it is asked for, so that no second model is held. Without LoRA they are the model's own.
    """
    return _Merged(model)


def save_adapter(
    model: nn.Module,
    folder: Path,
    *,
    base: Checkpoint,
    rope_config: Mapping[str, Any],
    overwrite: bool | None = None,
) -> None:
    """Write everything trained as an adapter of `base` that stock peft loads, with the rope that it was trained with.

    `rope_config` is the content of the config.json that the merged checkpoint has, kept in a folder of its own, with
    which transformers can load any copy of the base. Numbers are float32; peft casts them to the base's dtype.

    Raises RopextError where that fails, and leaves nothing.
    """
    from safetensors.torch import save

    rope = _rope(rope_config)
    whole = sorted(_trained_in_full(model))
    base_path = str(base.path.resolve())
    record = {"schema": SCHEMA, "kind": _KIND, "version": __version__, "base": base_path, "rope": rope}
    check_destination(folder, base.path, overwrite=overwrite)
    with staged(folder, overwrite=bool(overwrite)) as new:
        _peft_config(model, whole, base_path).save_pretrained(str(new))
        (new / ADAPTER_WEIGHTS).write_bytes(save(_tensors(model, whole), metadata={"format": "pt"}))
        (new / BASE_CONFIG).mkdir()
        (new / BASE_CONFIG / CONFIG).write_bytes(json_bytes(rope_config))
        (new / RECORD).write_bytes(json_bytes(record))
        (new / "README.md").write_text(_readme(base_path, rope), encoding="utf-8")


def check_adapter_base(folder: Path, base: Checkpoint) -> None:
    """Raises Refused where the adapter in `folder` was trained with another rope than `base` has."""
    record = read_json(folder / RECORD)
    if record.get("kind") != _KIND or not isinstance(record.get("rope"), dict):
        raise Refused(
            f"an adapter must say which rope it was trained with: {folder / RECORD} does not (kind "
            f"{short(record.get('kind'))}). Use an adapter that ropext wrote"
        )
    trained, found = record["rope"], _rope(base.config)
    differing = [key for key in sorted({*trained, *found}) if trained.get(key) != found.get(key)]
    if differing:
        raise Refused(
            f"an adapter needs the rope that it was trained with: {folder} has {_listed(trained, differing)}; its base "
            f"{base.path} has {_listed(found, differing)}. Take {record.get('base')} as its base, the merged "
            f"checkpoint instead, or load this base with the config in {folder / BASE_CONFIG} (README.md there)"
        )


class _Merged(Mapping[str, "Tensor"]):
    """Plain name -> weight. `in`, `len` and iteration compute nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = {f"{name}.weight": layer for name, layer in _lora_layers(model)}
        self._own = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not _is_low_rank(name)
        }

    def __getitem__(self, name: str) -> Tensor:
        import torch

        weight: Tensor = self._own[name].detach()
        if name not in self._layers:
            return weight
        with torch.no_grad():
            merged: Tensor = weight + self._layers[name].get_delta_weight(_NAME)
        return merged

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _check(model: Any, rank: int, alpha: float) -> None:
    """Raises Refused for numbers that train nothing, and for weights that are not whole float32 ones."""
    import torch

    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise Refused(f"the rank of LoRA is a whole number from 1: found {short(rank)}. 8 is usual, as in --lora 8")
    if not 0 < alpha < float("inf"):
        raise Refused(f"alpha scales what LoRA learns, so it is above 0: found {short(alpha)}. 2 * rank is usual")
    if getattr(model.config, "quantization_config", None) is not None:
        raise Refused(
            f"LoRA trains on float32 weights here: {model.name_or_path or 'the model'} is quantised, and 4-bit and "
            "8-bit bases are not built yet. Start from the checkpoint that it was quantised from"
        )
    other = next((name for name, p in model.named_parameters() if p.dtype != torch.float32), None)
    if other is not None:
        raise Refused(
            f"LoRA trains on float32 weights: {other} is {model.get_parameter(other).dtype}. Load the model in float32"
        )


def _head(model: Any) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()
    return head


def _norms_and_embeddings(model: Any) -> Iterator[nn.Module]:
    """Each norm, by the name of its class, as all of transformers' have it; then the embeddings and the head."""
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and not any(True for _ in module.children()):
            yield module
    yield model.get_input_embeddings()
    head = _head(model)
    if head is not None:
        yield head


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _is_low_rank(name: str) -> bool:
    return f".{_NAME}." in name and ".lora_" in name


def _trained_in_full(model: nn.Module) -> set[str]:
    """Names of the modules, tied ones under each of their names, whose own weights train."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name.rpartition(".")[0] for name, p in parameters if p.requires_grad and not _is_low_rank(name)}


def _tensors(model: nn.Module, whole: list[str]) -> dict[str, Tensor]:
    """What an adapter file holds, by the names that peft gives it; a tied weight once under each of its names."""
    trained = {f"{name}.{key}" for name in whole for key in model.get_submodule(name).state_dict()}
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): tensor.detach().cpu().clone()
        for name, tensor in model.state_dict().items()
        if name in trained or _is_low_rank(name)
    }


def _peft_config(model: Any, whole: list[str], base: str) -> Any:
    """What peft needs to know, the same bytes each time."""
    from peft import LoraConfig

    trained = model.peft_config[_NAME]
    head = _head(model)
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    config = LoraConfig(
        r=trained.r,
        lora_alpha=trained.lora_alpha,
        modules_to_save=whole or None,
        ensure_weight_tying=tied and bool(whole),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.target_modules = sorted(name for name, _ in _lora_layers(model))  # a set would come in any order
    return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """What positions depend on, whichever layout of config.json states it. Raises Refused where it cannot be told."""
    facts = read_facts(
        Checkpoint(path=Path(CONFIG), config=config, tokenizer_config={}, record=None, tensors={}, weight_files={})
    )
    block = dict(facts.scaling or {})
    kind = block.pop("type", "default")
    elsewhere = ("rope_theta", "partial_rotary_factor", "rope_type", ORIGINAL)
    told = {
        "window": facts.window,
        "rope_theta": facts.theta,
        "rotary_dims": facts.rotary_dims,
        "rope_type": block.get("rope_type", kind),
        "original_length": block.get(ORIGINAL, positions_of(config).get(ORIGINAL)),
        "settings": {key: value for key, value in block.items() if key not in elsewhere and value is not None},
        "other_layers": dict(facts.other_layers),
    }
    as_stored: dict[str, Any] = json.loads(json_bytes(told))
    return as_stored


def _listed(rope: Mapping[str, Any], keys: list[str]) -> str:
    return ", ".join(f"{key} {short(rope.get(key))}" for key in keys)


def _readme(base: str, rope: Mapping[str, Any]) -> str:
    stated = [key for key, value in rope.items() if value not in (None, {})]
    return f"""---
library_name: peft
---
# LoRA adapter for a longer context

Its base must have the rope settings that it was trained with: {_listed(rope, stated)}.
On a base without them, such as the original model before it was patched, it computes nonsense, without any error.

The base that it was trained on, with those settings: `{base}`.
The folder `{BASE_CONFIG}` beside this file gives them to any copy of it:

```python
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE", config=AutoConfig.from_pretrained("THIS FOLDER/{BASE_CONFIG}"))
model = PeftModel.from_pretrained(base, "THIS FOLDER")
```
"""
