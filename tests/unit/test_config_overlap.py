"""Files for --tp-comm-overlap-cfg: what is refused, what is said, and that all comes at once."""

from __future__ import annotations

import pytest

from megatron.config import ConfigError
from megatron.config.cli import parse, read_overlap_cfg
from megatron.config.overlap_cfg import BUFFERS

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data"
    " --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
)


def found(tmp_path, text, rs_dgrad=False, fp8=False):
    file = tmp_path / "ub.yaml"
    file.write_text(text)
    content, problems = read_overlap_cfg(str(file), rs_dgrad=rs_dgrad, fp8=fp8)
    assert not (content and problems)
    return content, [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qkv_fporp: {method: ring_exchange}", ["qkv_fporp in", "Did you mean qkv_fprop?"]),
        ("lm_head: {}", ["no such buffer", "Choose from qkv_fprop, "]),
        ("fc1_fprop: {method: pipeline}", ["fc1_fprop: method: pipeline", "Use ring_exchange."]),
        ("proj_fprop: {method: bulk}", ["Use pipeline or ring_exchange"]),
        ("qkv_wgrad: {method: ring}", ["no such method", "Use bulk"]),
        ("proj_wgrad: {method: bulk}", ["Use external"]),
        ("qkv_fprop: {num_sms: 4}", ["Did you mean num_sm?"]),
        ("qkv_fprop: {num_sm: 0}", ["num_sm: 0", "above 0"]),
        ("qkv_fprop: {num_sm: true}", ["num_sm: True", "above 0"]),
        ("qkv_fprop: {aggregate: 2}", ["aggregate: 2", "true or false"]),
        ("qkv_fprop: {comm_priority: high}", ["comm_priority: high", "whole number"]),
        ("qkv_fprop: {atomic_gemm: 1}", ["--fp8-format", "FP8 only"]),
        ("qkv_fprop: {is_reduce_scatter: true}", ["follows from qkv_fprop"]),
        ("qkv_fprop: {fp8_buf: 0}", ["follows from qkv_fprop"]),
        ("proj_fprop: {fp8_buf: 1, method: ring_exchange}", ["follows from proj_fprop"]),
        ("qkv_fprop: ring_exchange", ["are a mapping", "qkv_fprop: {method: ring_exchange}"]),
        ("- qkv_fprop", ["maps names of buffers"]),
        ("", ["maps names of buffers"]),
        ("qkv_fprop: {}\nqkv_fprop: {}", ["stands there twice"]),
        (
            "qkv_dgrad: {method: ring_exchange}",
            ["flag is off", "in parts", "Add --tp-comm-overlap-rs-dgrad"],
        ),
    ],
)
def test_mistakes(tmp_path, text, words):
    content, problems = found(tmp_path, text)
    assert content == {}
    assert len(problems) == 1
    for word in ("--tp-comm-overlap-cfg", *words):
        assert word in problems[0]


def test_input_gradients_in_parts(tmp_path):
    _, problems = found(tmp_path, "fc1_dgrad: {method: bulk}", rs_dgrad=True)
    assert "flag is on" in problems[0]
    text = "fc1_dgrad: {method: pipeline}\nfc1_wgrad: {num_sm: 2}"
    _, problems = found(tmp_path, text, rs_dgrad=True)
    assert len(problems) == 1
    assert "Remove fc1_wgrad" in problems[0]
    _, problems = found(tmp_path, "fc1_dgrad: {num_sm: 2}\nqkv_wgrad: {num_sm: 2}", rs_dgrad=True)
    assert problems == []


def test_all_mistakes_at_once(tmp_path):
    _, problems = found(tmp_path, "a: {}\nqkv_fprop: {b: 1, num_sm: x}\nfc2_fprop: 3")
    assert len(problems) == 4


def test_every_buffer_with_every_method(tmp_path):
    for buffer, methods in BUFFERS.items():
        for method in methods:
            in_parts = buffer in ("qkv_dgrad", "fc1_dgrad") and method != "bulk"
            content, problems = found(
                tmp_path, f"{buffer}: {{method: {method}, num_sm: 2, use_ce: 0}}", in_parts
            )
            assert problems == []
            assert content == {buffer: {"method": method, "num_sm": 2, "use_ce": 0}}
    settings = "fp8_buf: 1, atomic_gemm: 0, is_reduce_scatter: 1, gemm_priority: -1"
    assert found(tmp_path, f"proj_fprop: {{{settings}}}")[1] == []
    assert found(tmp_path, "qkv_fprop: {atomic_gemm: true}", fp8=True)[1] == []


def test_the_command_line_reports_the_file_with_everything_else(tmp_path):
    file = tmp_path / "ub.yaml"
    file.write_text("lm_head: {}\n")
    with pytest.raises(ConfigError) as caught:
        parse(f"{BASE} --tp-comm-overlap-cfg {file} --zebra".split(), 2)
    text = str(caught.value)
    assert "2 configuration problems" in text
    assert "lm_head" in text
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(f"{BASE} --tp-comm-overlap-cfg {tmp_path}/none.yaml".split(), 2)
    file.write_text("qkv_dgrad: {method: pipeline}\n")
    line = f"{BASE} --tp-comm-overlap-cfg {file} --tp-comm-overlap-rs-dgrad"
    config, _ = parse(line.split(), 2)
    assert config.tp_comm_overlap_cfg == str(file)


def test_switches():
    config, _ = parse(f"{BASE} --no-tp-comm-overlap-ag --disable-tp-comm-bulk-wgrad".split(), 2)
    assert (config.tp_comm_overlap_ag, config.tp_comm_bulk_wgrad) == (False, False)
    assert (config.tp_comm_overlap_rs, config.tp_comm_bulk_dgrad) == (True, True)
    assert config.tp_comm_overlap_rs_dgrad is False
    for what in ("ag", "rs"):
        for off in ("no", "disable"):
            with pytest.raises(ConfigError, match=f"Use --no-tp-comm-overlap-{what}"):
                parse(f"{BASE} --{off}-tp-comm-split-{what}".split(), 2)
