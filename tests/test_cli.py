"""The command line: help for everything, exit codes, errors of one or two lines, and nothing heavy imported early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import ropext
from ropext import cli
from tests.bare import bare_checkpoint, edit_json, snapshot

ROOT = Path(__file__).parents[1]
PATCH_OPTIONS = {
    *("--method", "--factor", "--to", "--out", "--native-length", "--inner", "--weights", "--overwrite"),
    *("--dry-run", "--no-verify", "--json", "--theta", "--beta-fast", "--beta-slow", "--no-truncate", "--mscale"),
    *("--mscale-all-dim", "--attention-factor", "--low-freq-factor", "--high-freq-factor", "--longrope-factors"),
    *("--extend-scaling", "--replace-scaling", "--readers"),
}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs main() in this process, in an empty folder: (exit code, stdout, stderr)."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("ROPEXT_DEBUG", raising=False)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ropext", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return call


@pytest.fixture
def source(tmp_path):
    return bare_checkpoint(tmp_path / "m")


def commands():
    group = typer.main.get_command(cli.app)
    return {"ropext": group, **group.commands}


def test_every_command_and_every_option_has_help():
    for name, command in commands().items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name}: {parameter.opts}"


def test_the_options_of_patch_are_those_of_the_contract_that_are_built():
    found = {option for parameter in commands()["patch"].params for option in parameter.opts if option[:2] == "--"}
    assert found - {"--help"} == PATCH_OPTIONS


def test_help_and_version_are_printed(run):
    code, out, err = run("--help")
    assert code == 0 and "patch" in out and not err
    assert run("--version")[:2] == (0, f"{ropext.__version__}\n")
    code, out, _ = run("patch", "--help")
    assert code == 0 and all(option in out for option in PATCH_OPTIONS)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--factor 4", 2, "--method ntk (recommended)"),
        ("--method ntk", 2, "--factor"),
        ("--method ntk --factor 4 --readers ollama", 2, "llama.cpp and vllm: found 'ollama'"),
        ("--method dynamic --factor 4 --readers llama.cpp", 3, "cannot carry dynamic"),
        ("--method foo --factor 4", 2, "linear, ntk, abf, dynamic, ntk-by-parts, yarn, longrope, llama3, progressive"),
        ("--method su --factor 4", 2, "longrope needs its lists"),
        ("--method abf --factor 4", 2, "--theta"),
        ("--method ntk --factor abc", 2, "--factor is a number: found 'abc'"),
        ("--method yarn --factor 4 --beta-fast 3,2", 2, "--beta-fast is a number: found '3,2'"),
        ("--method ntk --factor", 2, "--factor"),
        ("--method ntk --factor 4 --to 1000", 2, "disagree"),
        ("--method ntk --to abc", 2, "'abc'"),
        ("--method ntk --to 0", 2, "'0'"),
        ("--method ntk --to -1", 2, "'-1'"),
        ("--method ntk --to 2*1024", 2, "'2*1024'"),
        ("--method ntk --to 1k --native-length 0", 2, "'0'"),
        ("--method ntk --factor 4 --inner linear", 2, "progressive"),
        ("--method progressive --inner abf --factor 4", 2, "abf"),
        ("--method ntk --factor 4 --weights move", 2, "clone, link, copy"),
        ("--method ntk --factor 4 --max-position-embeddings 1024", 2, "--max-position-embeddings"),
        ("--method ntk --factor 4 extra", 2, "extra"),
        ("--method ntk --factor 0.25", 3, "Did you mean 4?"),
        ("--method ntk --factor 0", 3, "above 1"),
        ("--method ntk --factor -2", 3, "above 1"),
        ("--method ntk --factor 1", 3, "above 1"),
        ("--method linear --factor nan", 3, "above 1"),
        ("--method linear --factor inf", 3, "above 1"),
        ("--method linear --factor 1e9", 3, "16777216"),
        ("--method linear --to 32m", 3, "16777216"),
        ("--method linear --to 256", 3, "longer than the native length 256"),
        ("--method linear --to 2k --native-length 1k", 3, "1024 is above max_position_embeddings 256"),
    ],
)
def test_a_bad_request_ends_in_one_or_two_lines_with_its_exit_code_and_nothing_written(
    run, source, options, code, message
):
    before = snapshot(source.parent)
    found, out, err = run("patch", source, *options.split(), "--no-verify")
    assert found == code and not out
    assert err.startswith("ropext: ") and message in err and len(err.splitlines()) <= 2
    assert snapshot(source.parent) == before


@pytest.mark.parametrize("name", ["absent", "org/model", "", "x" * 300])
def test_a_model_that_is_not_there_is_wrong_usage(run, name):
    for command in (
        ("patch", name, "--method", "ntk", "--factor", "4"),
        ("show", name),
        ("revert", name, "--out", "r"),
    ):
        code, out, err = run(*command)
        assert code == 2 and not out and len(err.splitlines()) <= 2 and "a MODEL is a checkpoint directory" in err


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"model_type": "llama"}', '{"a": 1, "a": 1}', '{"model_type": "gpt2"}']
)
def test_a_bad_config_is_refused_in_one_or_two_lines(run, source, content):
    (source / "config.json").write_text(content)
    code, out, err = run("patch", source, "--method", "ntk", "--factor", "4", "--json")
    assert code == 3 and not out and len(err.splitlines()) <= 2


def test_an_output_that_exists_is_refused_with_exit_code_3_and_a_failed_write_ends_with_1(run, source, tmp_path):
    request = ("patch", source, "--method", "ntk", "--factor", "4", "--no-verify")
    assert run(*request)[0] == 0
    code, out, err = run(*request)
    assert code == 3 and "--overwrite" in err and not out
    assert run(*request, "--overwrite")[0] == 0
    (tmp_path / "file").write_text("")
    code, out, err = run(*request, "--out", tmp_path / "file" / "p")
    assert code == 1 and len(err.splitlines()) <= 2 and not out


def test_a_dry_run_prints_the_difference_and_writes_nothing(run, source):
    before = snapshot(source.parent)
    code, out, err = run("patch", source, "--method", "linear", "--factor", "4", "--dry-run", "--no-verify")
    assert code == 0 and not err and snapshot(source.parent) == before
    assert "max_position_embeddings: 256 -> 1024" in out and '"rope_type": "linear"' in out and "dry run" in out


def test_a_large_factor_warns_and_is_done(run, source):
    code, out, _ = run("patch", source, "--method", "linear", "--factor", "128", "--no-verify")
    assert code == 0 and "RPX008" in out and "warn" in out


def test_json_holds_the_findings_and_is_strict(run, source):
    code, out, err = run("patch", source, "--method", "linear", "--factor", "128", "--no-verify", "--json")
    assert code == 0 and not err
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {finding["code"]: finding["severity"] for finding in found["findings"]} == {
        "RPX007": "note",
        "RPX008": "warn",
    }


def test_ctrl_c_ends_with_130_and_leaves_nothing(run, source, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("ropext.write._bring", interrupted)
    before = snapshot(source.parent)
    code, out, err = run("patch", source, "--method", "ntk", "--factor", "4", "--no-verify")
    assert code == 130 and not out and err == "ropext: stopped\n"
    assert snapshot(source.parent) == before


def test_a_learning_rate_that_is_no_number_is_named(run, source):
    code, out, err = run("finetune", source, "--schedule", "512", "--learning-rate", "abc")
    assert code == 2 and not out and err == "ropext: --learning-rate is a number: found 'abc'\n"


def test_check_prints_its_findings_and_ends_with_3_only_for_an_unsafe_edit(run, source):
    assert run("check", source) == (0, f"model     {source}\nverdict   allowed\n", "")
    edit_json(source / "config.json", max_position_embeddings=1024, torch_dtype="bfloat16")
    code, out, err = run("check", source)
    assert code == 3 and not err and "[RPX003]" in out and out.endswith("verdict   refused\n")
    severities = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert severities == ["refuse", "note"]


def test_check_prints_one_json_document(run, source):
    edit_json(source / "config.json", max_position_embeddings=1024)
    code, out, err = run("check", source, "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 3 and not err and set(found) == {"model", "findings", "verdict"}
    assert [set(finding) for finding in found["findings"]] == [{"code", "severity", "message", "fix"}]
    assert (found["model"], found["verdict"]) == (str(source), "refused")


def test_check_without_a_model_takes_the_newest_output_or_the_built_in_checkpoint(run, source):
    assert run("check")[:2] == (0, "model     built-in\nverdict   allowed\n")
    run("patch", source, "--method", "ntk", "--factor", "4", "--no-verify")
    assert "ropext-runs/m-ntk-1k" in run("check")[1]


def test_check_explains_a_rule(run):
    code, out, err = run("check", "--explain", "rpx001")
    assert code == 0 and out.startswith("RPX001 (refuse): ") and "Source: " in out and not err
    code, out, err = run("check", "--explain", "RPX999")
    assert code == 2 and not out and "RPX001" in err and len(err.splitlines()) <= 2
    assert run("check", "model", "--explain", "RPX001")[0] == 2


def test_show_prints_the_table_and_its_json_is_strict(run, source):
    run("patch", source, "--method", "yarn", "--factor", "4", "--no-verify", "--out", "p")
    code, out, err = run("show", "p")
    assert code == 0 and not err
    assert (
        "yarn, factor 4 from 256 tokens" in out and "1.13863" in out and "window    1024 tokens: trained to 256" in out
    )
    found = json.loads(run("show", "p", "--json")[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert len(found["tables"][0]["pairs"]) == 8 and [step["label"] for step in found["lineage"]] == [
        "source",
        "patched",
    ]


def test_revert_writes_the_source_again_and_needs_an_output(run, source):
    run("patch", source, "--method", "ntk", "--factor", "4", "--no-verify", "--out", "p")
    assert run("revert", "p")[0] == 2
    code, out, err = run("revert", "p", "--out", "r")
    assert code == 0 and not err and "config.json" in out and snapshot(Path("r")) == snapshot(source)
    code, out, err = run("revert", "p", "--out", "r")
    assert code == 3 and not out and len(err.splitlines()) <= 2


def test_debug_shows_the_traceback(source, monkeypatch):
    monkeypatch.setenv("ROPEXT_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["ropext", "patch", str(source), "--method", "foo", "--factor", "4"])
    with pytest.raises(ropext.errors.UsageError):
        cli.main()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["patch", "{source}", "--method", "ntk", "--factor", "4", "--no-verify"]]
)
def test_help_and_an_unverified_patch_import_nothing_heavy(source, tmp_path, arguments):
    program = (
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'accelerate', 'numpy', 'matplotlib')\n"
        "atexit.register(lambda: print('heavy:', [name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from ropext.cli import main\n"
        "main()\n"
    )
    arguments = [argument.format(source=source) for argument in arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout
    assert done.stderr.splitlines()[-1] == "heavy: []"


@pytest.mark.parametrize("name", ["na\u00efve-\u6f22", os.fsdecode(b"not-utf8-\xff")])
def test_a_path_that_the_terminal_cannot_show_is_printed_all_the_same(tmp_path, name):
    source = bare_checkpoint(tmp_path / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "ropext", "patch", str(source), "--method", "ntk", "--factor", "4", "--no-verify"]
    for out, options in (("lines", []), ("json", ["--json"])):
        done = subprocess.run([*command, "--out", tmp_path / out, *options], env=environment, capture_output=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert name in done.stdout.decode("unicode_escape")
    assert json.loads(done.stdout)["source"] == str(source)


@pytest.mark.parametrize("option", ["--methods", "--tasks"])
@pytest.mark.parametrize("names", ["", ",", "ntk,", " , "])
def test_an_empty_name_in_a_list_is_wrong_usage(option, names, capsys, monkeypatch):
    from ropext import cli

    monkeypatch.setattr("sys.argv", ["ropext", "eval", "--lengths", "128", option, names])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert f"{option} takes names separated by commas" in capsys.readouterr().err
