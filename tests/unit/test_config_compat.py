"""Megatron-LM's flags: accepted, rewritten, refused; never taken for typing mistakes."""

from __future__ import annotations

import re

import pytest

from megatron.config import ConfigError
from megatron.config.cli import SPELLINGS, parse
from megatron.config.compat import Accepted, Rewritten, arity, judge
from megatron.config.megatron_flags import MEGATRON_FLAGS
from megatron.config.problems import Problem
from megatron.config.retired import (
    ACCEPTED,
    LAUNCHER_FLAGS,
    REFUSED,
    REFUSED_PATTERNS,
    REFUSED_VALUES,
    REWRITTEN,
)
from megatron.config.schema import SPECS


def only_problem(*tokens, world_size=1):
    with pytest.raises(ConfigError) as caught:
        parse(tokens, world_size)
    (problem,) = caught.value.problems
    return str(problem)


@pytest.mark.parametrize(
    "line",
    [
        "--use-mcore-models",
        "--use_mcore_models",
        "--use-flash-attn",
        "--use-dist-ckpt",
        "--fp8-wgrad",
        "--no-fp16-lgs",
        "--fp16-lgs",
        "--no-async-tensor-model-parallel-allreduce",
        "--no-scatter-gather-tensors-in-pipeline",
        "--calculate-per-token-loss",
        "--accumulate-allreduce-grads-in-fp32",
        "--no-bias-gelu-fusion",
        "--no-masked-softmax-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-rope-fusion",
        "--attention-backend flash",
        "--attention-softmax-in-fp32",
        "--no-create-attention-mask-in-dataloader",
        "--ckpt-fully-parallel-save",
        "--dist-ckpt-strictness log_all",
        "--timing-log-level 0",
        "--fp8-interval 3",
        "--local-rank 5",
        "--local_rank=5",
        "--dataloader-type single",
        "--use-rotary-position-embeddings",
        "--fp8-hybrid",
        "--nproc_per_node=4",
    ],
)
def test_accepted_with_one_notice(line):
    cfg, notices = parse(line.split(), 4)
    name = line.split()[0].partition("=")[0].replace("_", "-")
    about = [n for n in notices if name in n.replace("_", "-")]
    assert len(about) == 1
    assert "\n" not in about[0]
    assert set(notices) - set(about) == set(cfg.notices)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("--main-grads-dtype", "bf16"), ["Only fp32"]),
        (("--use-megatron-fsdp",), ["--use-distributed-optimizer"]),
        (("--moe-latent-size", "2"), ["got 2", "ixture-of-experts"]),
        (("--moe-shared-expert-overlap",), ["result is the same"]),
        (("--moe-enable-deepep",), ["alltoall"]),
        (("--multi-latent-attention",), ["ulti-latent"]),
        (("--overlap-p2p-communication-warmup-flush",), ["part of pipeline"]),
        (("--hybrid-context-parallel",), ["varying size", "--context-parallel-size"]),
        (("--no-tp-comm-split-ag",), ["removed", "--no-tp-comm-overlap-ag"]),
        (("--cuda-graph-impl", "local"), ["Only none"]),
        (("--batch-size", "3"), ["--micro-batch-size"]),
        (("--checkpoint-activations",), ["--recompute-granularity"]),
        (("--yaml-cfg", "a.yaml"), ["--config"]),
        (("--timing-log-level", "2"), ["Only 0"]),
        (("--attention-backend", "magic"), ["flash"]),
        (("--cross-entropy-fusion-impl", "te"), ["native"]),
        (("--langrl-env-config", "x"), ["einforcement"]),
        (("--rl-default-top-k", "3"), ["einforcement"]),
        (("--nproc_per_node=8",), ["launcher", "torchrun --nproc_per_node"]),
        (("--master-port", "1234"), ["launcher"]),
        (("--rdzv_backend=c10d",), ["launcher"]),
        (("--profile",), ["nsys"]),
        (("--img-h", "3"), ["GPT pretraining"]),
        (("--fp4-param-gather",), ["low precision", "--fp4-format"]),
    ],
)
def test_refused_with_the_reason(tokens, words):
    text = only_problem(*tokens)
    assert "no such flag" not in text
    for word in words:
        assert word in text


def test_arity_decides_what_a_refused_flag_swallows():
    with pytest.raises(ConfigError) as caught:
        parse(["--profile", "stray", "--moe-latent-size", "8", "9"])
    texts = [str(problem) for problem in caught.value.problems]
    assert [text.partition(":")[0] for text in texts] == [
        "stray",
        "--profile",
        "9",
        "--moe-latent-size",
    ]


def test_the_list_of_megatron_flags_is_whole():
    assert len(MEGATRON_FLAGS) > 850
    for flag in (
        "--num-layers",
        "--moe-layer-freq",
        "--rl-profile",
        "--use-checkpoint-opt_param-scheduler",
    ):
        assert flag in MEGATRON_FLAGS
    assert MEGATRON_FLAGS["--bf16"] == "0"
    assert MEGATRON_FLAGS["--lr"] == "1"
    assert MEGATRON_FLAGS["--data-path"] == "*"
    assert all(re.fullmatch(r"--[a-z0-9][A-Za-z0-9_-]*", flag) for flag in MEGATRON_FLAGS)


def test_every_megatron_flag_is_known():
    """Each one is a setting here, accepted, rewritten or refused with a reason."""
    for flag, count in MEGATRON_FLAGS.items():
        dashed = flag.replace("_", "-")
        if dashed in SPELLINGS:
            continue
        values = [] if count == "0" else ["7"]
        verdict = judge(dashed, values, known=SPELLINGS)
        if isinstance(verdict, Problem):
            assert "no such flag" not in str(verdict), flag
            assert verdict.fix
        else:
            assert isinstance(verdict, Accepted | Rewritten)


def test_flags_of_both_take_as_many_values():
    for flag, count in MEGATRON_FLAGS.items():
        entry = SPELLINGS.get(flag.replace("_", "-"))
        if entry is None:
            continue
        spec, _ = entry
        expected = "0" if spec.kind is bool else "*" if spec.many else "1"
        if flag != "--recompute-modules":
            assert count == expected, flag


def test_tables_do_not_overlap():
    tables = [set(ACCEPTED), set(REWRITTEN), set(REFUSED), set(LAUNCHER_FLAGS)]
    assert sum(len(t) for t in tables) == len(set().union(*tables))
    for flag in set().union(*tables):
        assert "_" not in flag
        assert flag not in SPELLINGS, flag


def test_refusals_are_about_real_flags():
    known = {flag.replace("_", "-") for flag in MEGATRON_FLAGS}
    assert set(REFUSED) <= known
    for pattern, _, _ in REFUSED_PATTERNS:
        assert any(re.match(pattern, flag[2:]) for flag in known), pattern
    for field, value in REFUSED_VALUES:
        assert value not in SPECS[field].setting.choices


def test_unknown_flags_have_no_arity():
    assert arity("--zebra") is None
    assert arity("--standalone") == "0"
    assert arity("--fp16-lgs") == "0"
    assert arity("--encoder-seq-length") == "1"
