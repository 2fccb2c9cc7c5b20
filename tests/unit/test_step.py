"""Pieces of a training step: launch environment, precision table, evaluation, skipped steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron.config import make_config
from megatron.core.errors import MeshError, PrecisionError
from megatron.core.fp8 import PrecisionRow
from megatron.training.initialize import Launch, read_launch, start
from megatron.training.precision import fallback_warning, refuse_fallback, summarize
from megatron.training.progress import Progress
from megatron.training.providers import setup_model, setup_sources, with_tokenizer
from megatron.training.step import TrainStep, evaluate


@pytest.fixture
def made():
    """Build runtime, parts and sources of a tiny run."""

    def make(**fields):
        cfg = make_config(**{
            "mock_data": True, "vocab_size": 64, "num_layers": 1, "hidden_size": 16,
            "num_attention_heads": 1, "seq_length": 16, "micro_batch_size": 2,
            "global_batch_size": 4, "train_iters": 8, "lr": 1e-2, "device": "cpu",
            "eval_interval": 4, "eval_iters": 2, "hidden_dropout": 0.1, "num_workers": 0, **fields,
        })  # fmt: skip
        runtime, tokenizer = with_tokenizer(start(cfg, Launch()))
        parts = setup_model(runtime.config, runtime)
        return runtime, parts, setup_sources(runtime.config, tokenizer, runtime)

    return make


DELAYED = {"bf16": True, "fp8_format": "hybrid", "fp8_amax_history_len": 4}


def test_the_same_step_is_the_same_whatever_came_before(made):
    runtime, parts, sources = made()
    step = TrainStep(runtime.config, runtime, parts, sources.train)
    first = step.run(1, 0)
    again_runtime, again_parts, again_sources = made()
    with torch.no_grad():  # other draws in between change nothing
        torch.rand(7)
        evaluate(again_runtime.config, again_runtime, again_parts, again_sources.valid[""], 0)
    again = TrainStep(again_runtime.config, again_runtime, again_parts, again_sources.train)
    assert again.run(1, 0) == first
    assert first.tokens == 4 * 16
    assert first.loss == pytest.approx(math.log(64), rel=0.02)


def test_microbatches_do_not_change_the_step(made):
    outcomes = []
    for size in (1, 2, 4):
        runtime, parts, sources = made(micro_batch_size=size, hidden_dropout=0.0,
                                       attention_dropout=0.0)  # fmt: skip
        outcomes.append(TrainStep(runtime.config, runtime, parts, sources.train).run(1, 0))
    for outcome in outcomes[1:]:
        assert outcome.loss == pytest.approx(outcomes[0].loss, rel=1e-6)
        assert outcome.update.grad_norm == pytest.approx(outcomes[0].update.grad_norm, rel=1e-5)


def test_a_skipped_step_leaves_weights_schedule_and_fp8_scales_alone(made, monkeypatch):
    runtime, parts, sources = made(**DELAYED)
    step = TrainStep(runtime.config, runtime, parts, sources.train)
    step.run(1, 0)
    weights = [p.clone() for p in parts.model.parameters()]
    history, scale = parts.fp8.book.history.clone(), parts.fp8.book.scale.clone()
    samples = parts.scheduler.num_samples
    forward = parts.model.forward
    monkeypatch.setattr(parts.model, "forward", lambda *a, **kw: forward(*a, **kw) * float("inf"))
    outcome = step.run(2, 4)
    assert not outcome.loss_is_finite
    assert not outcome.update.success
    assert all(torch.equal(a, b) for a, b in zip(weights, parts.model.parameters(), strict=True))
    assert torch.equal(history, parts.fp8.book.history)
    assert torch.equal(scale, parts.fp8.book.scale)
    assert parts.scheduler.num_samples == samples
    monkeypatch.setattr(parts.model, "forward", forward)
    assert step.run(2, 4).update.success


def test_fp8_scales_move_once_a_step(made):
    runtime, parts, sources = made(**DELAYED)
    step = TrainStep(runtime.config, runtime, parts, sources.train)
    for iteration in (1, 2, 3):
        step.run(iteration, 4 * (iteration - 1))
        meta = parts.model.decoder.layers[0].mlp.linear_fc1.fp8_meta
        filled = (meta["scaling_fwd"].amax_history[:, 0] > 0).sum().item()
        assert filled == iteration  # two microbatches, one entry
        assert meta["scaling_fwd"].amax_history[0, 0] == 0


def test_evaluation_has_no_dropout_and_records_nothing(made):
    runtime, parts, sources = made(**DELAYED)
    step = TrainStep(runtime.config, runtime, parts, sources.train)
    step.run(1, 0)
    history = parts.fp8.book.history.clone()
    losses = [evaluate(runtime.config, runtime, parts, sources.valid[""], 0) for _ in range(2)]
    assert losses[0] == losses[1]
    assert torch.equal(history, parts.fp8.book.history)
    assert parts.ddp.training
    assert evaluate(runtime.config, runtime, parts, sources.valid[""], 0, lambda: True) is None


def test_fully_masked_batches_are_no_division_by_zero(made, monkeypatch):
    runtime, parts, sources = made()
    batch = sources.train.batch

    def masked(*args):
        found = batch(*args)
        found.loss_mask.zero_()
        return found

    monkeypatch.setattr(sources.train, "batch", masked)
    outcome = TrainStep(runtime.config, runtime, parts, sources.train).run(1, 0)
    assert (outcome.loss, outcome.tokens, outcome.update.grad_norm) == (0.0, 0.0, 0.0)
    assert outcome.update.success


def test_launch_environment():
    assert read_launch({}) == Launch()
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch(env) == Launch(3, 8, 1, 2)
    for bad, name in [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE: got 2"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: got 2"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE: got two"),
    ]:
        with pytest.raises(MeshError, match=name):
            read_launch(bad)


def test_a_device_that_is_not_there_is_refused(made):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(MeshError, match="--device: got cuda"):
        made(device="cuda")


def row(path, gemm="fprop", requested="fp8", delivered="fp8", reason=""):
    return PrecisionRow(path, gemm, requested, delivered, "kernel", reason)


def test_precision_table_groups_layers_and_equal_gemms():
    rows = [row(f"decoder.layers.{i}.mlp.linear_fc1", g) for i in range(12)
            for g in ("fprop", "dgrad", "wgrad")]  # fmt: skip
    rows += [row("decoder.layers.0.mlp.linear_fc2", g, r, r) for g, r in
             [("fprop", "fp8"), ("dgrad", "fp8"), ("wgrad", "bf16")]]  # fmt: skip
    lines = summarize(rows).lines
    assert [(x.module, x.gemm, x.count) for x in lines] == [
        ("decoder.layers.*.mlp.linear_fc1", "all", 12),
        ("decoder.layers.*.mlp.linear_fc2", "fprop", 1),
        ("decoder.layers.*.mlp.linear_fc2", "dgrad", 1),
        ("decoder.layers.*.mlp.linear_fc2", "wgrad", 1),
    ]


def test_less_than_asked_for_is_an_error_and_a_policy_is_not():
    kept_out = row("output_layer", requested="bf16", delivered="bf16", reason="kept out")
    refuse_fallback([row("a"), kept_out])
    fallen = [row(f"decoder.layers.{i}.x", delivered="bf16", reason="width 17") for i in (0, 1)]
    with pytest.raises(PrecisionError) as error:
        refuse_fallback([kept_out, *fallen])
    text = str(error.value)
    assert "--fp8-format: got 2 GEMM(s)" in text
    assert text.count("decoder.layers.*.x was to run in fp8 and runs in bf16 (width 17)") == 1
    assert "--fp8-allow-fallback" in text
    assert "output_layer" not in text
    warning = fallback_warning([kept_out, *fallen])
    assert warning.startswith("2 GEMM(s) do not run as asked, and --fp8-allow-fallback is given: ")
    assert fallback_warning([row("a"), kept_out]) == ""


def test_progress_round_trips():
    progress = Progress(iteration=3, consumed_train_samples=12, nan_iterations=1)
    other = Progress()
    other.update({**progress.to_dict(), "unknown": 5})
    assert other == progress


def test_balancing_losses_weigh_the_same_whatever_the_mask(made, monkeypatch):
    """The step's gradient holds coefficient x mean over microbatches, also where few tokens count.

    The difference between runs with and without the loss is the gradient of the loss alone.
    """
    experts = {
        "num_experts": 4, "add_bias_linear": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "optimizer": "sgd", "clip_grad": 0.0,
    }  # fmt: skip
    found = []
    for kept in (16, 3):
        grads = []
        for coeff in (0.0, 0.5):
            runtime, parts, sources = made(**experts, moe_aux_loss_coeff=[coeff])
            read = sources.train.batch

            def batch(*place, read=read, kept=kept):
                whole = read(*place)
                mask = torch.zeros_like(whole.loss_mask)
                mask[:, :kept] = 1.0
                return replace(whole, loss_mask=mask)

            monkeypatch.setattr(sources.train, "batch", batch)
            step = TrainStep(runtime.config, runtime, parts, sources.train)
            done = step.run(1, 0)
            assert done.tokens == 4 * kept
            router = parts.model.get_parameter("decoder.layers.0.mlp.router.weight")
            grads.append(router.main_grad.clone())
        found.append(grads[1] - grads[0])
        assert list(done.moe.losses) == ["load_balancing_loss"]
    assert found[0].abs().max() > 1e-6
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-7)


def test_a_step_that_is_not_taken_moves_no_bias(made):
    runtime, parts, sources = made(
        num_experts=4, add_bias_linear=False, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )  # fmt: skip
    step = TrainStep(runtime.config, runtime, parts, sources.train)
    bias = parts.model.decoder.layers[0].mlp.router.expert_bias
    step.run(1, 0)
    moved = bias.clone()
    assert moved.abs().max() > 0
    with torch.no_grad():
        parts.model.decoder.final_layernorm.weight.fill_(math.nan)
    assert not step.run(2, 4).update.success
    assert torch.equal(bias, moved)
