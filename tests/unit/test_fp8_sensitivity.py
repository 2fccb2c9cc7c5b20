"""The harm of FP8 is measured: a planted layer that FP8 ruins comes out first."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config import fp8_policy
from megatron.core.errors import PrecisionError
from megatron.core.fp8 import Role
from megatron.training.parity.source import SyntheticSource
from megatron.training.sensitivity import Harm, Probe, chosen, groups_of, policy_text, ranked
from tests.trained_parts import build

TENSORWISE = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise",
              "squared_relu": True}  # fmt: skip
BAD = "decoder.layers.1.mlp.linear_fc2"
BATCHES = [(1, 0), (2, 8)]


def plant(parts):
    """One weight so large that a scale for the whole matrix leaves no other above zero.

    Its input is always zero, so that in high precision it does nothing.
    """
    layer = parts.model.decoder.layers[1].mlp
    with torch.no_grad():
        layer.linear_fc1.weight[3] = 0.0
        layer.linear_fc2.weight[5, 3] = 3e4


def probed(planted=True, kind="module", **fields):
    cfg, mesh, parts, _ = build(0, 1, **{**TENSORWISE, **fields})
    if planted:
        plant(parts)
    groups = groups_of(cfg, parts, kind)
    runtime = type("Runtime", (), {"mesh": mesh, "device": torch.device("cpu")})()
    return cfg, groups, Probe(cfg, runtime, parts, SyntheticSource(cfg, 1), groups), parts


def measured(**fields):
    cfg, groups, probe, parts = probed(**fields)
    before = [p.clone() for p in parts.model.parameters()]
    probe.calibrate(*BATCHES[0])
    harms = probe.measure([(group,) for group in groups], BATCHES)
    after = parts.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return cfg, groups, harms


@pytest.mark.parametrize("by", ["gradient", "loss"])
def test_a_planted_layer_is_ranked_first(by):
    _, groups, harms = measured()
    (first, harm), (_, second), *_ = ranked(groups, harms, by)
    assert first.name == BAD
    assert harm.figure(by) > 5 * second.figure(by)
    assert harm.snr(Role.WEIGHT) > 60  # the large weight is exact: this ratio sees no harm
    _, groups, harms = measured(fp8_format="e4m3", fp8_recipe="mxfp8")  # its block alone suffers
    assert dict(zip([g.name for g in groups], harms, strict=True))[BAD].figure(by) < harm.figure(by)


def test_without_it_the_same_layer_is_an_ordinary_one():
    _, groups, harms = measured(planted=False)
    errors = {group.name: harm.gradient_error for group, harm in zip(groups, harms, strict=True)}
    assert errors[BAD] < 2 * errors["decoder.layers.0.mlp.linear_fc2"]
    assert all(0 < error < 0.1 for error in errors.values())
    for harm in harms:  # E4M3 and E5M2 of ordinary tensors
        assert harm.snr(Role.INPUT) > 28
        assert harm.snr(Role.WEIGHT) > 28
        assert harm.snr(Role.GRAD_OUTPUT) > 22


def test_a_second_measurement_is_the_same():
    figures = [[(h.error, h.loss) for h in measured()[2]] for _ in range(2)]
    assert figures[0] == figures[1]


def test_delayed_scales_are_found_first():
    delayed = {"fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
    _, groups, harms = measured(planted=False, **delayed)
    for harm in harms:
        assert harm.snr(Role.GRAD_OUTPUT) > 20
        assert harm.gradient_error < 0.1
    cfg, groups, probe, parts = probed(planted=False, **delayed)
    probe.calibrate(1, 0)
    scale, history = parts.fp8.book.scale.clone(), parts.fp8.book.history.clone()
    probe.measure([groups], BATCHES)
    assert torch.equal(parts.fp8.book.scale, scale)
    assert torch.equal(parts.fp8.book.history, history)
    assert cfg.fp8_recipe == "delayed"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("layer", ["layer 0", "layer 1"]),
        ("kind", ["decoder.layers.*.self_attention.linear_qkv",
                  "decoder.layers.*.self_attention.linear_proj",
                  "decoder.layers.*.mlp.experts.linear_fc1",
                  "decoder.layers.*.mlp.experts.linear_fc2"]),
    ],
)  # fmt: skip
def test_groups_and_their_rules(kind, names):
    fields = {"num_experts": 4, "squared_relu": False}
    cfg, groups, _, parts = probed(planted=False, kind=kind, **fields)
    assert [group.name for group in groups] == names
    assert sum(group.share for group in groups) == pytest.approx(1.0)
    assert sum(len(group.layers) for group in groups) == 2 * (2 + 2 * 4)
    for group in groups:
        text = policy_text(cfg, [(group, "loud")], "why")
        follow = cfg.replace(fp8_policy=text)
        rules = fp8_policy.read(follow.fp8_policy_text).rules
        kept = [path for path in fp8_policy.fp8_paths(cfg) if rules[0].fits(path)]
        paths = {p.path.rpartition(".")[0] if "experts" in p.path else p.path for p in group.layers}
        assert set(kept) == paths
    assert parts.fp8.recipe is not None


def test_attention_in_fp8_is_judged_too():
    cfg, groups, probe, parts = probed(planted=False, fp8_dot_product_attention=True)
    (path, _) = parts.fp8.attention_layers
    names = [group.name for group in groups]
    assert names.index(path) == 1
    probe.calibrate(1, 0)
    attention, rest = probe.measure(
        [[groups[1]], [group for group in groups if "attention" not in group.name]], BATCHES[:1]
    )
    assert 0 < attention.gradient_error < rest.gradient_error
    text = policy_text(cfg, [(groups[1], "")], "")
    assert fp8_policy.read(cfg.replace(fp8_policy=text).fp8_policy_text).rules[0].fits(path)
    assert groups[1].share == pytest.approx(cfg.seq_length * 32 / (2 * (16 * 32 + 12 * 32 * 32)))


def test_what_is_kept():
    _, groups, _, _ = probed(planted=False)
    harms = [Harm(error=float(i), norm=1.0, batches=1) for i in range(len(groups))]
    ranking = ranked(groups, harms, "gradient")
    assert [group for group, _ in ranking] == groups[::-1]
    assert chosen(ranking, 3, None) == groups[:-4:-1]
    some = chosen(ranking, None, 0.4)
    assert some[0] == groups[-1]
    assert 0.2 < sum(group.share for group in some) <= 0.4
    with pytest.raises(PrecisionError, match="--keep-share: got 0.001"):
        chosen(ranking, None, 0.001)
    assert Harm(error=math.nan, norm=1.0).gradient_error == math.inf


def test_rules_of_the_run_stay_below_those_that_are_added():
    own = "rules:\n  - {layers: 0, wgrad: bf16}\n  - {module: '*.1.mlp.linear_fc2', fprop: bf16}\n"
    cfg, groups, _, _ = probed(planted=False, fp8_policy=own)
    worst = next(group for group in groups if group.name == BAD)
    rules = fp8_policy.read(policy_text(cfg, [(worst, "")], "x")).rules
    assert [(rule.modules, rule.recipe, rule.gemms) for rule in rules] == [
        ((BAD,), "bf16", ()), (("*",), None, (("wgrad", False),))
    ]  # fmt: skip
    nothing = {"fp8_format": None, "fp8_recipe": "delayed"}
    with pytest.raises(PrecisionError, match="no layer in FP8"):
        probed(planted=False, **nothing)
