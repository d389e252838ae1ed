"""LoRA against stock peft and stock transformers, which load what is written in processes of their own.

Everything runs on two-layer models of tests/tiny.py, patched by ropext, trained for a few steps of 32 tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import ropext
from ropext import adapter
from ropext.adapter import add_lora, check_adapter_base, merged_state, save_adapter, trained_parameters
from ropext.checkpoint import open_checkpoint
from ropext.errors import Refused
from ropext.families import PROVEN
from ropext.load import load_model
from ropext.loss import check_head
from tests.tiny import make_checkpoint

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "phi3", "falcon"]
WRITTEN = (
    *("README.md", "adapter_config.json", "adapter_model.safetensors"),
    *("base_config/config.json", "ropext.json"),
)
TIED = {"gemma", "falcon", "tied llama"}
# Loads bases and adapters as their users do; what they compute goes into files.
STOCK = """
import json, sys, torch, warnings
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
for base, adapter, config, out in json.loads(sys.argv[1]):
    config = {"config": AutoConfig.from_pretrained(config)} if config else {}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **config)
    if adapter:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            model = PeftModel.from_pretrained(model, adapter)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    with torch.no_grad():
        torch.save({"logits": model.eval()((torch.arange(600)[None] * 7) % 320).logits, "tied": tied}, out)
"""


def tiny(folder, family="llama", method="yarn"):
    """A checkpoint of a family, and its patch: 256 tokens made 1024."""
    name, tied = family.removeprefix("tied "), {"tie_word_embeddings": True} if "tied" in family else {}
    make_checkpoint(folder / "source", name, **tied)
    verify = name not in PROVEN  # of the others, only a reader knows the table
    ropext.patch(str(folder / "source"), method=method, factor=4.0, out=folder / "patched", verify=verify)
    return folder / "patched"


@pytest.fixture
def patched(tmp_path):
    return tiny(tmp_path)


def batch(step):
    return torch.randint(0, 320, (2, 32), generator=torch.Generator().manual_seed(step))


def loss(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def trained(model, steps=3, rate=1e-2):
    """The model after a few steps that change everything that trains."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for step in range(steps):
        loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model):
    with torch.no_grad():
        return model.eval()((torch.arange(600)[None] * 7) % 320).logits


def stock(*cases):
    """What stock transformers and peft make of each (base, adapter, config of the base) in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{number}" for number in range(len(cases))]
        jobs = [[*map(str, case), file] for case, file in zip(cases, files, strict=True)]
        done = subprocess.run([sys.executable, "-I", "-c", STOCK, json.dumps(jobs)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [torch.load(file) for file in files]


def save(model, base, folder, **options):
    save_adapter(model, folder, base=open_checkpoint(base), rope_config=open_checkpoint(base).config, **options)
    return folder


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """By family: a patched base, a model tuned from it, its logits, and what stock peft makes of the adapter."""
    made = {}
    for family in [*FAMILIES, "tied llama"]:
        folder = tmp_path_factory.mktemp("family")
        base = tiny(folder, family, method="ntk")
        model = trained(add_lora(load_model(base), 4))
        made[family] = (base, model, logits(model), save(model, base, folder / "adapter"))
    found = stock(*[(base, adapter, "") for base, _, _, adapter in made.values()])
    return {family: (*rest[:3], loaded) for (family, rest), loaded in zip(made.items(), found, strict=True)}


@pytest.mark.parametrize("family", [*FAMILIES, "tied llama"])
def test_merged_weights_and_the_adapter_in_stock_peft_compute_what_the_tuned_model_does(families, family):
    base, model, expected, loaded = families[family]
    plain = load_model(base)
    assert (expected - logits(plain)).abs().max() > 0.1, "or nothing was learnt"
    merged = merged_state(model)
    assert set(merged) == {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    plain.load_state_dict(dict(merged), strict=False)
    torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(model), expected), "asking for the merged weights changes nothing"
    torch.testing.assert_close(loaded["logits"], expected, rtol=0, atol=1e-5)
    head = model.get_output_embeddings().weight
    assert (head is model.get_input_embeddings().weight) == loaded["tied"] == (family in TIED)


def test_an_untrained_adapter_changes_nothing_and_leaves_a_model_that_losses_can_be_taken_of(patched):
    model = load_model(patched)
    before = logits(model)
    assert add_lora(model, 4) is model and torch.equal(logits(model), before)
    check_head(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_layers_are_those_that_peft_calls_all_linear(tmp_path, family):
    from peft import LoraConfig, inject_adapter_in_model

    folder = make_checkpoint(tmp_path / "m", family)
    theirs = load_model(folder)
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear"), theirs)
    ours = add_lora(load_model(folder), 4, train_norms_and_embeddings=False)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    ours_train, theirs_train = ({n for n, p in m.named_parameters() if p.requires_grad} for m in (ours, theirs))
    assert ours_train == theirs_train and len(ours_train) >= 16


@pytest.mark.parametrize("family", [*FAMILIES, "tied llama"])
def test_beside_low_rank_updates_exactly_norms_and_embeddings_train(tmp_path, family):
    tied = {"tie_word_embeddings": True} if family == "tied llama" else {}
    model = add_lora(load_model(make_checkpoint(tmp_path / "m", family.removeprefix("tied "), **tied)), 4)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all(".base_layer." in name for name in frozen)
    low_rank = {name for name, p in model.named_parameters() if "lora_" in name}
    others = {name: p for name, p in model.named_parameters() if name not in frozen | low_rank}
    vocabulary = [name for name, p in others.items() if p.shape == (320, 64)]
    assert len(vocabulary) == (1 if family in TIED else 2)
    assert all(p.dim() == 1 for name, p in others.items() if name not in vocabulary)
    assert {name.rpartition(".")[0] for name in others} >= {
        name for name, module in model.named_modules() if type(module).__name__.endswith("Norm")
    }


def test_only_what_trains_takes_gradients_and_optimizer_state(patched):
    model = add_lora(load_model(patched), 4)
    # A and B of q, k, v, o, gate, up and down in two layers; five norms of 64; embeddings and head of 320 x 64.
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    assert trained_parameters(model) == 2 * sum(4 * sum(shape) for shape in shapes) + 5 * 64 + 2 * 320 * 64
    loss(model, batch(0)).backward()
    taken = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    assert taken == trained_parameters(model)
    low_rank_alone = add_lora(load_model(patched), 4, train_norms_and_embeddings=False)
    assert trained_parameters(low_rank_alone) == 2 * sum(4 * sum(shape) for shape in shapes)


def test_merged_weights_are_those_of_peft_merge_and_unload(patched, tmp_path):
    from peft import PeftModel

    model = trained(add_lora(load_model(patched), 4))
    theirs = PeftModel.from_pretrained(load_model(patched), save(model, patched, tmp_path / "a")).merge_and_unload()
    merged = merged_state(model)
    assert len(merged) == len(dict(theirs.named_parameters()))
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(merged[name], weight.detach(), rtol=0, atol=1e-6)
        assert merged[name].dtype == torch.float32 and not merged[name].requires_grad


def test_a_model_without_lora_is_its_own_merged_state(patched):
    model = load_model(patched)
    merged = merged_state(model)
    assert {name: weight.data_ptr() for name, weight in merged.items()} == {
        name: p.data_ptr() for name, p in model.named_parameters(remove_duplicate=False)
    }
    assert "model.norm.bias" not in merged


def test_low_rank_updates_alone_are_saved_and_loaded_too(patched, tmp_path):
    from peft import PeftModel

    model = trained(add_lora(load_model(patched), 2, alpha=7.0, train_norms_and_embeddings=False))
    folder = save(model, patched, tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["modules_to_save"]) == (2, 7.0, None)
    theirs = PeftModel.from_pretrained(load_model(patched), folder)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=0, atol=1e-5)


def test_the_rope_travels_with_the_adapter_and_makes_an_unpatched_base_the_right_one(patched, tmp_path):
    model = trained(add_lora(load_model(patched), 4))
    folder = save(model, patched, tmp_path / "adapter")
    source, expected = tmp_path / "source", logits(model)
    wrong, right, alone = stock((source, folder, ""), (source, folder, folder / "base_config"), (folder, "", ""))
    assert (wrong["logits"] - expected).abs().max() > 0.1, "this is what has to be refused"
    torch.testing.assert_close(right["logits"], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(alone["logits"], expected, rtol=0, atol=1e-5)  # it leads transformers to its base


def test_an_adapter_on_a_base_with_another_rope_is_refused_with_both_named_and_the_way_out(patched, tmp_path):
    folder = save(add_lora(load_model(patched), 4), patched, tmp_path / "adapter")
    check_adapter_base(folder, open_checkpoint(patched))
    with pytest.raises(Refused) as refusal:
        check_adapter_base(folder, open_checkpoint(tmp_path / "source"))
    message = str(refusal.value)
    assert f"{folder} has" in message and "rope_type 'yarn'" in message and "window 1024" in message
    assert f"{tmp_path / 'source'} has" in message and "rope_type 'default'" in message and "window 256" in message
    assert f"Take {patched}" in message and str(folder / "base_config") in message


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "dynamic", "llama3"])
def test_a_base_is_judged_by_its_rope_not_by_the_layout_of_its_config(tmp_path, method):
    from transformers import AutoConfig

    make_checkpoint(tmp_path / "source")
    ropext.patch(str(tmp_path / "source"), method=method, factor=4.0, out=tmp_path / "patched")
    folder = save(add_lora(load_model(tmp_path / "patched"), 1), tmp_path / "patched", tmp_path / "adapter")
    base = open_checkpoint(tmp_path / "patched")
    rewritten = AutoConfig.from_pretrained(base.path).to_dict()
    assert rewritten.keys() != base.config.keys()
    check_adapter_base(folder, replace(base, config=rewritten))
    ropext.patch(str(tmp_path / "source"), method=method, factor=3.5, out=tmp_path / "other")
    for other in ("source", "other"):
        with pytest.raises(Refused, match="needs the rope that it was trained with"):
            check_adapter_base(folder, open_checkpoint(tmp_path / other))


def test_an_adapter_of_other_programs_is_not_judged(patched, tmp_path):
    with pytest.raises(Refused, match=r"a checkpoint needs ropext\.json"):
        check_adapter_base(tmp_path, open_checkpoint(patched))
    with pytest.raises(Refused, match="must say which rope it was trained with.*'patch'"):
        check_adapter_base(patched, open_checkpoint(patched))


def test_what_is_written_is_the_same_bytes_each_time_and_says_what_base_it_needs(patched, tmp_path):
    model = trained(add_lora(load_model(patched), 4))
    first, second = (save(model, patched, tmp_path / name) for name in "ab")
    files = {name: (first / name).read_bytes() for name in WRITTEN}
    assert files == {name: (second / name).read_bytes() for name in WRITTEN}
    assert set(WRITTEN) == {path.relative_to(first).as_posix() for path in first.rglob("*") if path.is_file()}
    assert files["base_config/config.json"] == (patched / "config.json").read_bytes()
    readme = files["README.md"].decode()
    assert str(patched) in readme and "rope_type 'yarn'" in readme and "window 1024" in readme
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == str(patched)
    stored = load_file(first / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == trained_parameters(model)
    with pytest.raises(Refused, match="not overwritten unasked"):
        save(model, patched, first)
    save(model, patched, first, overwrite=True)


def test_two_runs_start_from_the_same_random_updates_and_leave_the_random_state_alone(patched):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (add_lora(load_model(patched), 4, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert all(torch.equal(one[key], two[key]) for key in one) and not torch.equal(one[name], other[name])


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_a_saved_state_resumes_in_a_fresh_model_bit_for_bit(tmp_path, family):
    from accelerate import Accelerator

    checkpoint = make_checkpoint(tmp_path / "m", family)

    def run(seed, steps, *, take_up=None, leave=None):
        accelerator = Accelerator(cpu=True)
        model = add_lora(load_model(checkpoint), 4, seed=seed)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if take_up:
            accelerator.load_state(str(take_up))
        for step in steps:
            accelerator.backward(loss(model, batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            if leave and step == 1:
                merged_state(model)["model.layers.0.self_attn.q_proj.weight"]  # as a stage's checkpoint does
                accelerator.save_state(str(leave))
        return model

    whole = run(1, range(4), leave=tmp_path / "state")
    resumed = run(2, range(2, 4), take_up=tmp_path / "state")
    apart = run(2, range(2, 4))
    names = [name for name, _ in whole.named_parameters()]
    same = [torch.equal(whole.get_parameter(name), resumed.get_parameter(name)) for name in names]
    assert names == [name for name, _ in resumed.named_parameters()] and all(same)
    assert not all(torch.equal(whole.get_parameter(name), apart.get_parameter(name)) for name in names)


@pytest.mark.parametrize("rank", [0, -1, True, 2.0])
def test_a_rank_that_adapts_nothing_is_refused(patched, rank):
    with pytest.raises(Refused, match=f"a whole number from 1: found {rank}"):
        add_lora(load_model(patched), rank)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_that_scales_to_nothing_is_refused(patched, alpha):
    with pytest.raises(Refused, match="alpha .* above 0"):
        add_lora(load_model(patched), 4, alpha=alpha)


def test_quantised_and_half_precision_bases_are_refused(patched):
    with pytest.raises(Refused, match=r"q_proj\.weight is torch\.bfloat16|embed_tokens\.weight is torch\.bfloat16"):
        add_lora(load_model(patched, dtype="bfloat16"), 4)
    quantised = load_model(patched)
    quantised.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(Refused, match="4-bit and 8-bit bases are not built yet"):
        add_lora(quantised, 4)


def test_a_model_without_linear_layers_is_refused(tmp_path):
    model = load_model(make_checkpoint(tmp_path / "m", "gpt2"))  # its layers are transformers' own Conv1D
    with pytest.raises(Refused, match="linear layers: GPT2LMHeadModel has none besides its head"):
        add_lora(model, 4)
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(model, "peft_config")


def test_names_of_peft_and_of_this_room_agree():
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    assert SAFETENSORS_WEIGHTS_NAME == adapter.ADAPTER_WEIGHTS
