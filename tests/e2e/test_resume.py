"""Five steps, a new process, three more: bitwise the same as eight steps in one go."""

from __future__ import annotations

import pytest
import torch

from megatron.core.dist_checkpointing import schema
from megatron.core.dist_checkpointing.storage import Reader
from megatron.training.checkpoint_config import read_common
from megatron.training.residual_entries import PREFIX as RESIDUAL_PREFIX
from tests.e2e.launch import launch

SMALL = [
    "--mock-data", "--vocab-size", "250", "--num-layers", "2", "--hidden-size", "32",
    "--num-attention-heads", "4", "--swiglu", "--normalization", "RMSNorm",
    "--position-embedding-type", "rope", "--disable-bias-linear", "--seq-length", "32",
    "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "8",
    "--log-interval", "1", "--lr", "1e-3", "--lr-warmup-iters", "3", "--lr-decay-style", "cosine",
    "--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--device", "cpu", "--bf16",
]  # fmt: skip
FP8 = ["--fp8-format", "hybrid", "--fp8-recipe"]
DELAYED = [*FP8, "delayed", "--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"]
MXFP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
ATTENTION = [*FP8, "tensorwise", "--fp8-dot-product-attention"]
PRECISIONS = {"bf16": [], "delayed": DELAYED, "tensorwise": [*FP8, "tensorwise"], "mxfp8": MXFP8}
PRECISIONS["nvfp4"] = ["--fp4-format", "e2m1"]
LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "dp2": [],
    "dp2 sharded": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-num-buckets",
        "3",
    ],
    "dp2 fp8": [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-num-buckets",
        "3",
        "--grad-reduce-dtype",
        "fp8",
        "--fp8-param-gather",
    ],
    "dp2 own scales": ["--fp8-amax-reduction", "tp"],
    "cp2": ["--context-parallel-size", "2"],
    "cp2 own scales": ["--context-parallel-size", "2", "--fp8-amax-reduction", "tp"],
}


def run(world_size, *args):
    if "--save" in args and "--save-interval" not in args:
        args = (*args, "--save-interval", "100")
    done = launch(world_size, [*SMALL, *args])
    assert done.codes == [0] * world_size, done.out
    return done


def content(root, iteration):
    reader = Reader(root / f"iter_{iteration:07d}")
    common = read_common(reader)
    plain = {
        name: common[name]
        for name in ("iteration", "progress", "opt_param_scheduler", "optimizer_scalars", "fp8")
    }
    return {key: reader.read(key) for key in reader.tensors}, plain


def assert_same(first, second):
    assert first[1] == second[1]
    assert set(first[0]) == set(second[0])
    for key, value in first[0].items():
        assert torch.equal(value, second[0][key]), key


CASES = [(p, layout) for p in ("bf16", "delayed", "tensorwise") for layout in ("tp2", "dp2")]
CASES += [("mxfp8", "tp2"), ("nvfp4", "tp2"), ("attention", "cp2")]
CASES += [("delayed", "dp2 own scales"), ("bf16", "cp2")]
CASES += [("delayed", "cp2"), ("delayed", "cp2 own scales")]
CASES += [("bf16", "dp2 sharded"), ("delayed", "dp2 fp8")]


@pytest.mark.parametrize(("precision", "layout"), CASES)
def test_stop_and_go_is_bitwise(tmp_path, precision, layout):
    flags = [*{**PRECISIONS, "attention": ATTENTION}[precision], *LAYOUTS[layout]]
    straight = run(2, *flags, "--save", f"{tmp_path}/straight")
    parts = ["--save", f"{tmp_path}/parts", "--load", f"{tmp_path}/parts"]
    first = run(2, *flags, *parts, "--exit-interval", "5")
    second = run(2, *flags, *parts)
    assert "will start from random" in first.out
    assert "successfully loaded checkpoint" in second.out
    assert len(straight.losses()) == 8
    assert first.losses() + second.losses() == straight.losses()
    tensors, plain = content(tmp_path / "straight", 8)
    assert_same((tensors, plain), content(tmp_path / "parts", 8))
    residual = [key for key in tensors if key.startswith(RESIDUAL_PREFIX)]
    assert bool(residual) == ("fp8" in layout)
    fp8 = [key for key in tensors if key.startswith(schema.FP8_PREFIX) and key not in residual]
    replicas = 2 if "own scales" in layout else 1
    layers = {"delayed": 2 * 4, "attention": 2}.get(precision, 0)  # that have scales to keep
    assert len(fp8) == layers * 4 * replicas


FP32 = [flag for flag in SMALL if flag != "--bf16"]
QUIET = ["--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "14"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run 14 steps under a layout once and save after 10: `(directory, losses)`."""
    done = {}

    def get(precision, layout, ranks):
        key = (precision, layout, ranks)
        if key not in done:
            root = tmp_path_factory.mktemp("saved")
            flags = [*flags_of(precision, layout), "--save", str(root), "--save-interval", "10"]
            finished = launch(ranks, flags)
            assert finished.codes == [0] * ranks, finished.out
            done[key] = (root, finished.losses())
        return done[key]

    return get


def flags_of(precision, layout):
    base = FP32 if precision == "fp32" else SMALL
    return [*base, *PRECISIONS.get(precision, []), *LAYOUTS.get(layout, []), *QUIET]


MOVES = [
    (("tp2", 2), ("single", 1)),
    (("single", 1), ("tp2", 2)),
    (("dp2", 2), ("tp2", 2)),
    (("tp2", 2), ("dp2", 2)),
    (("cp2", 2), ("tp2", 2)),
    (("single", 1), ("cp2", 2)),
    (("dp2 sharded", 2), ("tp2", 2)),
    (("tp2", 2), ("dp2 sharded", 2)),
]


# Scales do not depend on how the optimizer's state lies: one way in and out of each cut is enough.
@pytest.mark.parametrize(
    ("precision", "source", "target"),
    [("fp32", *move) for move in MOVES] + [("delayed", *MOVES[i]) for i in (0, 3, 4, 5)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_another_layout_goes_on_with_the_same_losses(saved, precision, source, target):
    root, losses = saved(precision, *source)
    layout, ranks = target
    load = ["--load", str(root), "--ckpt-step", "10"]
    other = launch(ranks, [*flags_of(precision, layout), *load])
    assert other.codes == [0] * ranks, other.out
    assert len(other.losses()) == 4
    # FP32 sums differ in their order; bf16 activations round on top of that.
    tolerance = 2e-5 if precision == "fp32" else 2e-2
    for a, b in zip(losses[10:], other.losses(), strict=True):
        assert abs(a - b) <= tolerance


# To and from BF16, and from recipe to recipe with and without scales of its own.
CHANGES = [pair for p in PRECISIONS if p != "bf16" for pair in ((p, "bf16"), ("bf16", p))]
CHANGES += [("delayed", "tensorwise"), ("tensorwise", "mxfp8"), ("mxfp8", "delayed")]
CHANGES += [("delayed", "nvfp4")]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_precision_may_change_between_runs(saved, first, second):
    root, losses = saved(first, "single", 1)
    load = ["--load", str(root), "--ckpt-step", "10"]
    after = launch(1, [*flags_of(second, "single"), *load])
    assert after.codes == [0], after.out
    # FP8 rounds what BF16 does not, and the loss falls by 0.01 a step here.
    assert abs(after.losses()[0] - losses[10]) < 0.02
    assert "FP8 state:" in after.out


def test_flags_of_loading(tmp_path):
    root = f"{tmp_path}/c"
    run(1, "--save", root, "--save-interval", "2", "--exit-interval", "4")
    tuned = run(1, "--load", root, "--finetune", "--exit-interval", "1")
    assert "at iteration 0" in tuned.out
    assert tuned.lines("iteration        1/")
    earlier = run(1, "--load", root, "--ckpt-step", "2", "--exit-interval", "3")
    assert earlier.lines("iteration        3/")
    named = run(1, "--load", f"{root}/iter_0000002", "--exit-interval", "3")
    assert named.losses() == earlier.losses()
    fresh = run(1, "--load", root, "--no-load-optim", "--no-load-rng", "--exit-interval", "5")
    assert fresh.lines("iteration        5/")


def test_weights_only_checkpoints(tmp_path):
    root = f"{tmp_path}/c"
    run(1, "--save", root, "--no-save-optim", "--no-save-rng", "--exit-interval", "2")
    reader = Reader(tmp_path / "c" / "iter_0000002")
    assert all(schema.is_model_key(key) for key in reader.tensors)
    assert schema.COMMON_KEY in reader.blobs
    assert not [key for key in reader.blobs if key.startswith("rng_state")]
    refused = launch(1, [*SMALL, "--load", root])
    assert refused.codes == [1]
    assert "--no-load-optim" in refused.out
    assert run(1, "--load", root, "--no-load-optim", "--exit-interval", "3").losses()


def test_no_checkpoint(tmp_path):
    done = launch(1, [*SMALL, "--load", f"{tmp_path}/x", "--exit-on-missing-checkpoint"])
    assert done.codes == [1]
    assert "could not find the metadata file" in done.out


def test_another_model_is_refused_with_a_diff(tmp_path):
    root = f"{tmp_path}/c"
    run(1, "--save", root, "--exit-interval", "1")
    done = launch(2, [*SMALL, "--load", root, "--num-layers", "3", "--hidden-size", "128"])
    assert done.codes == [1, 1]
    assert "--num-layers is 2 in the checkpoint and 3 in this run" in done.out
    assert "--hidden-size is 32 in the checkpoint and 128 in this run" in done.out


MODEL_FLAGS = {
    "--num-layers", "--hidden-size", "--num-attention-heads", "--normalization",
    "--position-embedding-type", "--vocab-size",
}  # fmt: skip


def without_model_flags(flags):
    kept, skip = [], False
    for flag in flags:
        if (
            not skip
            and flag not in MODEL_FLAGS
            and flag not in ("--swiglu", "--disable-bias-linear")
        ):
            kept.append(flag)
        skip = flag in MODEL_FLAGS
    return kept


def test_use_checkpoint_args(tmp_path):
    root = f"{tmp_path}/c"
    run(1, "--save", root, "--save-interval", "2", "--exit-interval", "4")
    flags = [*without_model_flags(SMALL), "--load", root, "--use-checkpoint-args"]
    same = run(1, "--load", root, "--ckpt-step", "2", "--exit-interval", "3")
    done = launch(1, [*flags, "--ckpt-step", "2", "--exit-interval", "3"])
    assert done.codes == [0], done.out
    assert done.losses() == same.losses()
    agreeing = launch(1, [*flags, "--num-layers", "2", "--exit-interval", "5"])
    assert agreeing.codes == [0], agreeing.out
    refused = launch(1, [*flags, "--num-layers", "3"])
    assert refused.codes == [1]
    assert "--num-layers is 2 in the checkpoint and 3 on the command line" in refused.out
    seed = ["--seed", "7", "--data-mix-change", "continue"]  # not the model: this run decides
    other = launch(1, [*flags, *seed, "--exit-interval", "5"])
    assert other.codes == [0], other.out


def test_a_full_disk_ends_all_ranks_and_keeps_the_last_checkpoint(tmp_path):
    root = tmp_path / "c"
    run(2, "--save", str(root), "--exit-interval", "1")
    script = tmp_path / "full.py"
    script.write_text(
        "import runpy, sys\n"
        "from megatron.core.dist_checkpointing import storage\n"
        "def full(self, data): raise OSError(28, 'No space left on device')\n"
        "storage._ChecksumStream.write = full\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    from tests.e2e.launch import ROOT

    flags = [str(ROOT / "pretrain_gpt.py"), *SMALL, "--save", str(root), "--load", str(root),
             "--save-interval", "100"]  # fmt: skip
    done = launch(2, [*flags, "--exit-interval", "2"], script=script)
    assert done.codes == [1, 1], done.out
    assert "No space left on device" in done.out
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert run(2, "--load", str(root), "--exit-interval", "2").losses()
