"""The console lines, character by character: people's scripts parse them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from megatron.observe.events import EvalEnd, IntervalEnd, MemoryUse, PrecisionLine, StepEnd
from megatron.observe.lines import (
    arguments_dump,
    memory_line,
    perplexity,
    precision_table,
    stamp,
    training_line,
    validation_lines,
)

NOW = datetime(2026, 3, 4, 5, 6, 7, 890123)
STEP = StepEnd(
    iteration=10,
    train_iters=500,
    consumed_samples=320,
    losses={"lm loss": 10.5},
    learning_rate=1e-4,
    global_batch_size=32,
    tokens=65536,
    flops=1e15,
    grad_norm=1.23456,
)
INTERVAL = IntervalEnd(
    last=STEP,
    iterations=10,
    losses={"lm loss": 10.75},
    seconds_per_iteration=0.12345,
    fastest_seconds_per_iteration=0.12,
    tflops_per_rank=410.26,
    tokens_per_second=123456.78,
    skipped_iterations=0,
    nan_iterations=0,
)


def test_plain_training_line():
    assert training_line(INTERVAL, NOW) == (
        " [2026-03-04 05:06:07.890123] iteration       10/     500 | consumed samples:          320"
        " | elapsed time per iteration (ms): 123.5 | learning rate: 1.000000E-04"
        " | global batch size:    32 | lm loss: 1.075000E+01 | loss scale: 1.0 | grad norm: 1.235"
        " | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_every_optional_field_has_its_place():
    step = replace(STEP, num_zeros=17, params_norm=99.5, loss_scale=65536.0)
    line = training_line(replace(INTERVAL, last=step), NOW, log_throughput=True)
    names = [part.split(":")[0].strip() for part in line.split("|")[1:-1]]
    assert names == [
        "consumed samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "tokens per second",
        "learning rate",
        "global batch size",
        "lm loss",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "number of skipped iterations",
        "number of nan iterations",
    ]
    assert "throughput per GPU (TFLOP/s/GPU): 410.3 |" in line
    assert "| num zeros: 17 | params norm: 99.500 |" in line
    assert "| loss scale: 65536.0 |" in line


def test_an_interval_without_a_step_shows_neither_loss_nor_norm():
    step = replace(STEP, losses={}, grad_norm=None, skipped=True, nan=True)
    interval = replace(INTERVAL, last=step, losses={}, skipped_iterations=3, nan_iterations=3)
    line = training_line(interval, NOW)
    assert "loss:" not in line
    assert "grad norm" not in line
    assert line.endswith("| number of skipped iterations:   3 | number of nan iterations:   3 |")


def test_validation_lines():
    text = validation_lines(EvalEnd("iteration 1000", 1000, {"lm loss": 2.0}))
    rule, line, again = text.split("\n")
    assert line == (
        " validation loss at iteration 1000 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert rule == again == "-" * (len(line) + 1)
    assert perplexity(1e9) == pytest.approx(485165195.4097903)


def test_arguments_dump_is_sorted_and_dotted():
    text = arguments_dump({"seed": 1, "Lr": None, "bf16": True}).split("\n")
    assert text[0] == "------------------------ arguments ------------------------"
    assert text[1] == "  bf16 " + "." * 44 + " True"
    assert [line.split()[0] for line in text[1:4]] == ["bf16", "Lr", "seed"]
    assert text[-1] == "-------------------- end of arguments ---------------------"


def test_stage_and_memory():
    assert stamp("after training is done", NOW) == (
        "[after training is done] datetime: 2026-03-04 05:06:07 "
    )
    mib = 1024 * 1024
    use = MemoryUse(3, 2, "cuda", mib, 2 * mib, 3 * mib, 4 * mib)
    assert memory_line(use) == (
        "[Rank 3] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | "
        "reserved: 3.00 | max reserved: 4.00"
    )
    assert memory_line(replace(use, source="process")).endswith(
        "memory (MB) | resident: 1.00 | max resident: 2.00"
    )


def test_precision_table_aligns_its_columns():
    rows = [
        PrecisionLine(
            "decoder.layers.*.mlp.linear_fc1", "fprop", "fp8 x", "fp8 x", "emulated", "", 4
        ),
        PrecisionLine("output_layer", "fprop", "BF16", "BF16", "mm", "kept out of FP8", 1),
    ]
    lines = precision_table(rows).split("\n")
    assert len(lines) == 4
    assert lines[0] == "precision: 4 of 5 linear layers in FP8"
    column = lines[1].index("gemm")
    assert {line[column:].split()[0] for line in lines[2:]} == {"fprop"}
    assert lines[3].endswith("1        kept out of FP8")


def test_precision_table_counts_linear_layers_only():
    attention = "decoder.layers.*.self_attention."
    rows = [
        PrecisionLine("embedding.word_embeddings", "all", "bf16", "bf16", "lookup", "", 1),
        PrecisionLine(attention + "core_attention", "all", "bf16", "bf16", "softmax", "", 4),
        PrecisionLine(attention + "linear_proj", "fprop", "fp8 x", "fp8 x", "emulated", "", 4),
        PrecisionLine("output_layer", "all", "bf16", "bf16", "mm", "", 1),
    ]
    assert precision_table(rows).startswith("precision: 4 of 5 linear layers in FP8\n")
    fp4 = PrecisionLine(attention + "linear_qkv", "fprop", "fp4 x", "fp4 x", "emulated", "", 3)
    both = precision_table([*rows, fp4])
    assert both.startswith("precision: 4 of 8 linear layers in FP8, 3 in FP4\n")
    assert precision_table([fp4]).startswith("precision: 3 of 3 linear layers in FP4\n")
    name = attention + "core_attention"
    rows[1:2] = [
        PrecisionLine(name, product, "fp8 x", "fp8 x", "emulated", "", 3)
        for product in ("qk", "pv", "backward")
    ]
    rows.append(PrecisionLine(name, "all", "bf16", "bf16", "softmax", "", 1))
    expected = "precision: 4 of 5 linear layers in FP8, and the attention of 3 of 4 layers\n"
    assert precision_table(rows).startswith(expected)
