"""Every method against stock transformers: its formulas, and what both majors do with a written checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ropext
from ropext.errors import Refused, UsageError
from ropext.factors import read_factors
from ropext.rope import frequencies_at, method_named
from tests.bare import bare_checkpoint
from tests.tiny import make_checkpoint

few = settings(max_examples=40, deadline=None)  # the time that an example takes says nothing here
FLOAT32 = 5e-6  # relative; stock code raises theta to a power in float32, which costs log(theta) * 2^-23
LONG = (1.0, 1.1, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
LISTS = {"short_factor": (1.0,) * 7 + (1.25,), "long_factor": LONG}
REQUESTS = {  # of a model with 8 rotated pairs and a native length of 256
    "linear": {"method": "linear"},
    "ntk": {"method": "ntk"},
    "abf": {"method": "abf", "theta": 5e5},
    "dynamic": {"method": "dynamic"},
    "ntk-by-parts": {"method": "ntk-by-parts"},
    "yarn": {"method": "yarn"},
    "yarn with all settings": {
        "method": "yarn",
        "beta_fast": 16,
        "beta_slow": 0.5,
        "truncate": False,
        "attention_factor": 1.25,
    },
    "yarn with mscale": {"method": "yarn", "mscale": 1, "mscale_all_dim": 0.707},
    "longrope": {"method": "longrope", **LISTS},
    "llama3": {"method": "llama3"},
    "llama3 with bands": {"method": "llama3", "low_freq_factor": 2, "high_freq_factor": 8},
    "progressive": {"method": "progressive", "inner": "llama3"},
}
LENGTHS = (256, 257, 1024)


@st.composite
def cases(draw):
    """A method with settings, and a model for it."""
    pairs, native = draw(st.integers(2, 64)), draw(st.integers(16, 2**18))
    factor = round(native * draw(st.floats(1.01, 64))) / native
    name = draw(st.sampled_from(["linear", "dynamic", "ntk-by-parts", "yarn", "longrope", "llama3"]))
    lists = st.lists(st.floats(0.5, 200), min_size=pairs, max_size=pairs).map(tuple)
    low = draw(st.floats(0.25, 4))
    bands = {
        "beta_fast": draw(st.none() | st.floats(8, 64)),
        "beta_slow": draw(st.none() | st.floats(0.25, 4)),
        "truncate": draw(st.sampled_from([None, True, False])),
    }
    given_settings = {
        "ntk-by-parts": bands,
        "yarn": bands | {"attention_factor": draw(st.none() | st.floats(0.5, 2))},
        "longrope": {"short_factor": draw(lists), "long_factor": draw(lists)},
        "llama3": {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8))},
    }.get(name, {})
    partial = draw(st.sampled_from([1.0, 0.5]))
    return method_named(name, max(factor, 1 + 1 / native), native, given_settings), pairs, native, partial


@few
@given(case=cases(), theta=st.floats(100, 1e8), beyond=st.floats(0.5, 64))
def test_frequencies_and_attention_scaling_equal_stock_transformers(case, theta, beyond):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    method, pairs, native, partial = case
    form = method.config_form(theta, 2 * pairs)
    config = LlamaConfig(
        head_dim=round(2 * pairs / partial),
        max_position_embeddings=form.window or round(native * method.factor),
        rope_parameters={**form.scaling, "rope_theta": form.theta, "partial_rotary_factor": partial},
    )
    for length in (None, native, native + 1, round(native * beyond)):
        stock, scaling = ROPE_INIT_FUNCTIONS[form.scaling["rope_type"]](config, "cpu", seq_len=length)
        assert not stock.isnan().any()
        planned = frequencies_at(method, length or native, theta, 2 * pairs)
        assert stock.tolist() == pytest.approx(planned, rel=FLOAT32)
        assert scaling == pytest.approx(method.attention_scaling, rel=1e-12)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A checkpoint by every request, verified; a partial rotary one; and Phi-3 with its own form of longrope."""
    root = tmp_path_factory.mktemp("outputs")
    llama = make_checkpoint(root / "llama")
    neox = make_checkpoint(root / "neox", "gpt_neox", rotary_pct=0.5)
    phi3 = make_checkpoint(root / "phi3", "phi3")
    found = {}
    for name, request in REQUESTS.items():
        found[name] = ropext.patch(str(llama), factor=4.0, out=root / name, **request)
    for method in ("yarn", "dynamic", "llama3"):
        found[f"neox {method}"] = ropext.patch(str(neox), factor=4.0, out=root / f"neox-{method}", method=method)
    found["phi3"] = ropext.patch(str(phi3), factor=4.0, out=root / "phi3-longrope", method="longrope", **LISTS)
    return found


@pytest.fixture(scope="module", params=["this_reader", "other_reader"])
def readings(request, outputs):
    found = request.getfixturevalue(request.param)(LENGTHS, [result.out for result in outputs.values()])
    return dict(zip(outputs, found, strict=True))


def test_both_majors_compute_the_table_at_every_length_and_the_attention_scaling(outputs, readings):
    for name, result in outputs.items():
        request = REQUESTS.get(name, {"method": result.method, **(LISTS if name == "phi3" else {})})
        chosen = method_named(request["method"], 4.0, 256, {k: v for k, v in request.items() if k != "method"})
        reading = readings[name]
        for length in LENGTHS:
            planned = frequencies_at(chosen, length, 10000.0, result.rotary_dims)
            assert reading.table(length) == pytest.approx(planned, rel=FLOAT32), (name, length, reading.version)
            for scaling in reading.scaling[length].values():
                assert scaling == pytest.approx(chosen.attention_scaling), (name, length, reading.version)


def test_no_output_makes_a_reader_warn_of_rope_but_phi3(readings):
    for name, reading in readings.items():
        assert not reading.warnings, (name, reading.version)
        if name == "phi3" and reading.version.startswith("5"):
            assert all("set the `factor` field" in line for line in reading.log)
        else:
            assert not reading.log, (name, reading.version)


def test_the_original_length_stands_beside_the_block_for_llama3_and_longrope(outputs):
    for name, result in outputs.items():
        config = json.loads((Path(result.out) / "config.json").read_text())
        beside = config.get("original_max_position_embeddings")
        assert beside == (256 if result.method in ("longrope", "llama3") or result.inner == "llama3" else None), name
        if beside and name != "phi3":
            assert beside == config["rope_scaling"]["original_max_position_embeddings"]
        assert "type" not in (config["rope_scaling"] or {}) or name == "phi3"


def test_dynamic_keeps_the_native_length_as_its_window_and_records_the_target(outputs):
    config = json.loads((Path(outputs["dynamic"].out) / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_scaling"] == {"rope_type": "dynamic", "factor": 4.0}
    assert outputs["dynamic"].target_length == 1024
    found = {finding.code: finding for finding in outputs["dynamic"].findings}
    assert "mixes bases" in found["RPX032"].message
    assert "divides the slowest pair by 13 at 1024 tokens, where 4 would do" in found["RPX010"].message
    assert "A factor of 3.44 reaches 1024 tokens too" in found["RPX010"].fix


def test_patch_names_the_oldest_reader_of_llama3_and_what_gguf_may_lose(outputs):
    codes = {name: {finding.code for finding in result.findings} for name, result in outputs.items()}
    assert {name for name in codes if "RPX053" in codes[name]} == {
        "llama3",
        "llama3 with bands",
        "progressive",
        "neox llama3",
    }
    lost = {name for name in codes if "RPX054" in codes[name]}
    assert lost >= {"dynamic", "longrope", "progressive", "ntk-by-parts", "yarn with all settings", "phi3"}
    assert not lost & {"linear", "ntk", "yarn", "llama3"}


@pytest.mark.parametrize(
    ("readers", "refused"),
    [
        (("llama.cpp",), {"dynamic", "ntk-by-parts", "yarn with attention_factor", "yarn without truncate"}),
        (("vLLM",), {"dynamic", "ntk-by-parts", "yarn with attention_factor"}),
        ((), set()),
    ],
)
def test_a_reader_that_is_named_counts(tmp_path, readers, refused):
    source = str(bare_checkpoint(tmp_path / "m"))
    requests = {name: {"method": name} for name in ("linear", "ntk", "yarn", "llama3", "dynamic", "ntk-by-parts")}
    requests |= {"progressive": {"method": "progressive", "inner": "linear"}}
    requests |= {"yarn with attention_factor": {"method": "yarn", "attention_factor": 1.2}}
    requests |= {"yarn without truncate": {"method": "yarn", "truncate": False}}
    found = set()
    for name, request in requests.items():
        try:
            result = ropext.patch(source, factor=4.0, readers=readers, dry_run=True, verify=False, **request)
        except Refused as error:
            assert "RPX055" in str(error)
            found.add(name)
        else:
            codes = {finding.code for finding in result.findings}
            linear_in_vllm = bool(readers) and readers[0] == "vLLM" and name in ("linear", "progressive")
            assert ("RPX056" in codes) == linear_in_vllm
    assert found == refused


def test_abf_says_which_theta_reaches_the_target(tmp_path):
    source = bare_checkpoint(tmp_path / "m")

    def finding(theta):
        result = ropext.patch(str(source), method="abf", theta=theta, factor=4.0, dry_run=True, verify=False)
        return next((found for found in result.findings if found.code == "RPX010"), None)

    exact = 10000 * 4 ** (16 / 8)  # pair 4 of 8 is the first that does not complete a turn
    assert finding(exact) is None and finding(exact * 1.1) is None
    assert f"--theta {exact:.6g}" in finding(exact / 2).fix and "reaches about" in finding(exact / 2).message
    assert finding(exact * 4).fix == f"--theta {exact:.6g} reaches the target"


@pytest.mark.parametrize("method", ["linear", "yarn", "llama3"])
def test_phi3_is_refused_with_all_but_longrope_and_nothing_written(tmp_path, method):
    source = make_checkpoint(tmp_path / "m", "phi3")
    with pytest.raises(Refused, match="longrope"):
        ropext.patch(str(source), method=method, factor=4.0, out=tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_lists_are_counted_against_the_rotated_pairs_not_the_head(tmp_path):
    source = bare_checkpoint(tmp_path / "m", model_type="gpt_neox", rotary_pct=0.5)
    with pytest.raises(Refused, match="each of the 4 rotated pairs: short_factor has 8"):
        ropext.patch(str(source), method="longrope", factor=4.0, out=tmp_path / "p", **LISTS)


@pytest.mark.parametrize(
    ("name", "text", "short"),
    [
        ("f.json", json.dumps({"long_factor": LONG}), (1.0,) * 8),
        ("f.json", json.dumps({"long_factor": LONG, "short_factor": [1.5] * 8}), (1.5,) * 8),
        ("f.csv", "\n".join(map(str, LONG)), (1.0,) * 8),
        ("f.csv", "long_factor,short_factor\n" + "\n".join(f"{value}, 1.5" for value in LONG), (1.5,) * 8),
        ("f.csv", "\n".join(f"1.5,{value}" for value in LONG) + "\n", (1.5,) * 8),
    ],
)
def test_lists_are_read_from_json_and_csv(tmp_path, name, text, short):
    (tmp_path / name).write_text(text)
    assert read_factors(tmp_path / name) == {"short_factor": short, "long_factor": LONG}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f.json", "[1, 2]"),
        ("f.json", "{"),
        ("f.json", '{"long_factor": "12"}'),
        ("f.json", '{"long_factor": [1, null]}'),
        ("f.json", '{"long_factor": [1, 2], "short_factor": [1]}'),
        ("f.csv", ""),
        ("f.csv", "a,b\n1,2"),
        ("f.csv", "1,2,3"),
        ("f.csv", "1\n2,3"),
        ("f.csv", "1\nx"),
        ("none.csv", None),
    ],
)
def test_a_file_without_lists_is_an_error_of_one_line(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name) as failure:
        read_factors(tmp_path / name)
    assert len(str(failure.value).splitlines()) == 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0", "-1"])
def test_lists_with_unusable_numbers_are_refused(tmp_path, value):
    (tmp_path / "f.json").write_text(f'{{"long_factor": [{value}, 1, 1, 1, 1, 1, 1, 1]}}')
    source = bare_checkpoint(tmp_path / "m")
    with pytest.raises(Refused, match="each number of long_factor must be a finite number above 0"):
        ropext.patch(str(source), method="longrope", factor=4.0, longrope_factors=tmp_path / "f.json", dry_run=True)


@pytest.mark.parametrize("name", ["theta", "beta_fast", "attention_factor", "low_freq_factor"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -2.0, 1e-320, 1e300])
def test_no_setting_ends_in_a_nan_table(tmp_path, name, value):
    method = {"theta": "abf", "low_freq_factor": "llama3"}.get(name, "yarn")
    with pytest.raises(Refused, match=f"{name} must be a finite number above 0"):
        ropext.patch(str(bare_checkpoint(tmp_path / "m")), method=method, factor=4.0, dry_run=True, **{name: value})
