"""The order of the rooms: a module of ropext imports only from rooms above its own, and nothing heavy when imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Seconds each, so only where they are used.
HEAVY = (
    *("torch", "transformers", "accelerate", "matplotlib", "numpy", "huggingface_hub"),
    *("lm_eval", "datasets", "pyarrow", "jinja2", "peft"),
)

# Top to bottom. `demo` is where the built-in checkpoint lies: a path, which imports nothing, so any room may ask it.
# `ropext` is the package's own __init__: it offers what api holds.
ROOMS = [
    *("demo", "version", "errors", "hub", "lengths"),
    *("checkpoint", "stock", "families", "facts", "rope", "carried", "factors", "plan", "safety", "verify"),
    *("provenance", "extension", "staging", "write", "load", "loaded"),
    *("texts", "recipe", "memory", "schedule", "feed", "pack", "packing", "pose", "mixture", "chat", "jumps"),
    *("loss", "process", "cut", "figures", "summary", "score", "held_out", "material", "watch", "state"),
    *("training", "prepare", "adapter", "train", "run"),
    *("kept", "measure", "inspection", "entrant", "retrieval", "compare", "gate"),
    *("probe", "report", "export", "workspace"),
    *("results", "api", "ropext", "show", "cli", "__main__", "demo.build"),
]

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("ropext/**/*.py"))
}


def room(module: str) -> str:
    """The room of a dotted name below ropext: "ropext.train.stage" -> "train". Raises KeyError if it has none."""
    parts = module.split(".")[1:]
    for name in (".".join(parts[:2]), *parts[:1], "ropext"):
        if name in ROOMS and (name != "ropext" or not parts):
            return name
    raise KeyError(module)


def imports(module: str) -> Iterator[str]:
    """Every module of ropext that this one imports: inside functions and for type checking too."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ropext")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: relative imports hide which room is meant"
            if node.module.split(".")[0] == "ropext":
                whole = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name if name in MODULES else node.module for name in whole)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_rooms_above_its_own(module):
    own = ROOMS.index(room(module))
    below = [name for name in imports(module) if ROOMS.index(room(name)) > own]
    assert not below, f"{module} imports from a room below it"
    siblings = [name for name in imports(module) if room(name) == room(module)]
    assert module not in siblings, f"{module} imports itself"


def test_a_module_without_a_place_in_the_order_is_noticed():
    assert room("ropext.train.stage") == "train" and room("ropext.demo.build") == "demo.build"
    assert room("ropext.demo") == "demo" and room("ropext") == "ropext"
    with pytest.raises(KeyError, match="ropext.helpers"):
        room("ropext.helpers")


def test_importing_ropext_imports_nothing_heavy():
    light = [module for module in MODULES if module not in ("ropext.demo.build", "ropext.__main__")]
    program = (
        "import importlib, json, sys\n"
        "loaded = {}\n"
        f"for module in {light}:\n"
        "    importlib.import_module(module)\n"
        f"    loaded[module] = [name for name in {HEAVY} if name in sys.modules]\n"
        "print(json.dumps(loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    guilty = {module: heavy for module, heavy in json.loads(done.stdout).items() if heavy}
    assert not guilty, "the first module here imports what it names; those after it only find it loaded"
