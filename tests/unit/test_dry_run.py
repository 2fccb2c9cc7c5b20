"""A run on paper: what it checks, what it refuses, what it leaves behind."""

from __future__ import annotations

import re

import pytest
import torch

import pretrain_gpt
from megatron.config import ConfigError, make_config
from megatron.core.datasets.source import Source
from megatron.core.errors import CheckpointError, DataError, MeshError
from megatron.core.mesh import ParallelState
from megatron.core.shards import FlatRange
from megatron.training.communication import Row, lines, readable, table
from megatron.training.dry_run import checks
from megatron.training.dry_run.live_memory import LiveMemory
from megatron.training.dry_run.ranks import World, spans
from megatron.training.dry_run.trace import META
from megatron.training.initialize import Launch, start
from megatron.training.progress import Progress
from megatron.training.providers import setup_model
from tests.saving import save_checkpoint
from tests.small_models import SMALL

MODEL = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
    "--vocab-size", "128", "--micro-batch-size", "1", "--global-batch-size", "8", "--lr", "1e-3",
    "--train-iters", "2", "--dry-run",
]  # fmt: skip
MOCK = [*MODEL, "--mock-data"]
FOUR = ["--fake-world-size", "4"]
TE = ["--transformer-impl", "transformer_engine"]
PP2 = ["--pipeline-model-parallel-size", "2"]


def run(capsys, *args):
    code = pretrain_gpt.main([str(a) for a in args])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def small(world_size=1, **fields):
    return make_config(world_size, **{**SMALL, "global_batch_size": 8, **fields})


class TestTheCommand:
    def test_a_run_that_works(self, capsys):
        args = ["--tensor-model-parallel-size", "2", "--sequence-parallel", *PP2]
        code, out, err = run(capsys, *MOCK, "--fake-world-size", "8", *args)
        assert (code, err) == (0, "")
        assert "8 rank(s) on paper, tp 2 x cp 1 x pp 2 x dp 2" in out
        assert "tp: 4 x 2; dp: 4 x 2; pp: 4 x 2" in out
        assert "each of the 8 samples of a step once" in out
        assert out.count("communication of a step") == 2
        assert out.splitlines()[-1].startswith("the dry run is done")

    def test_rows_that_no_token_has_are_counted(self, capsys):
        args = ["--tokenizer-type", "ByteLevelTokenizer", "--mock-data", *MODEL]
        code, out, _ = run(capsys, *args, "--vocab-size", "1000")
        assert code == 0
        note = "NOTE: the tokenizer has 257 ids and the model 1,024 rows (--vocab-size 1000): 767"
        assert out.count(note) == 1
        assert "are never used" not in run(capsys, *args, "--vocab-size", "300")[1]

    def test_the_experts_have_a_mesh_of_their_own(self, capsys):
        experts = ["--num-experts", "4", "--disable-bias-linear"]
        sizes = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1", *PP2]
        args = ["--tensor-model-parallel-size", "2", *experts, *sizes]
        code, out, _ = run(capsys, *MOCK, "--fake-world-size", "8", *args)
        assert code == 0
        assert "pp 2 x dp 2; experts etp 1 x ep 2 x pp 2 x edp 2" in out
        code, _, err = run(capsys, *MOCK, "--fake-world-size", "6", *args)
        assert (code, err.count("Set --fake-world-size to a multiple of 4")) == (2, 2)

    def test_fp8_is_shown_and_counted(self, capsys):
        fp8 = ["--bf16", "--fp8-format", "hybrid"]
        code, out, _ = run(capsys, *MOCK, *FOUR, *fp8)
        assert code == 0
        assert "precision: 8 of 9 linear layers in FP8" in out
        assert "_scaled_mm e4m3xe4m3" in out
        assert re.search(r"amax +all_reduce +tp-cp-dp +4 +1 ", out)
        _, later, _ = run(capsys, *MOCK, *FOUR, *fp8, "--fp8-warmup-iters", "1")
        note = "until iteration 1 nothing is in FP8 (--fp8-warmup-iters)\n"
        assert later.replace(note, "") == out  # memory and transfers of the part that is in FP8
        assert note in later

    def test_snapshots_are_counted(self, capsys):
        code, out, _ = run(capsys, *MOCK, *FOUR, "--bf16", "--fp8-spike-rollback")
        assert code == 0
        parameters = int(re.search(r"parameters: ([0-9,]+) in", out)[1].replace(",", ""))
        size, unit = re.search(r"--fp8-spike-rollback: about ([0-9.]+) (\w+) of host", out).groups()
        assert unit == "KiB"
        # fp32 masters and two moments.
        assert float(size) * 1024 == pytest.approx(12 * parameters, rel=0.1)

    @pytest.mark.parametrize(
        ("args", "code", "message"),
        [
            (["--fake-world-size", "3", *PP2], 2, "Set --fake-world-size to a multiple of 2"),
            (["--fake-world-size", "0"], 2, "--fake-world-size: got 0. A run has at least"),
            ([*FOUR, "--hidden-size", "30"], 2, "--hidden-size"),
            ([*FOUR, "--global-batch-size", "6"], 2, "--global-batch-size, --micro-batch-size"),
            ([*FOUR, "--device", "cpu", *TE], 1, "--transformer-impl: got"),
            ([*FOUR, "--data-path", "nowhere"], 2, "--data-path: got nowhere"),
            ([*FOUR, "--load", "nowhere", "--exit-on-missing-checkpoint"], 1, "--exit-on-missing"),
            (
                [*FOUR, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x.json"],
                1,
                "--tokenizer-model: got x.json",
            ),
        ],
    )
    def test_what_a_launch_refuses(self, capsys, args, code, message):
        base = MODEL if "--data-path" in args else MOCK
        found, out, err = run(capsys, *base, *args)
        assert found == code
        assert message in err
        assert "the dry run is done" not in out

    def test_a_fake_world_needs_a_dry_run(self):
        with pytest.raises(ConfigError, match=r"--fake-world-size, --dry-run: got 4 without"):
            small(fake_world_size=4)
        assert small(fake_world_size=4, dry_run=True).data_parallel_size == 4
        assert small(2, dry_run=True).world_size == 2

    def test_gpus_are_not_needed_for_a_run_on_gpus(self, capsys):
        gpus = ["--device", "cuda", "--distributed-backend", "nccl"]
        code, out, _ = run(capsys, *MOCK, *FOUR, *gpus, *TE)
        assert code == 0
        unchecked = out[out.index("not checked here") :]
        assert "GPUs: whether they are there" in unchecked
        assert "Transformer Engine" in unchecked

    def test_nothing_is_left_behind(self, capsys, tmp_path):
        save = ["--save", tmp_path / "a" / "b", "--save-interval", "1"]
        code, _, _ = run(capsys, *MOCK, *FOUR, *save, "--load", tmp_path / "a" / "b")
        assert code == 0
        assert list(tmp_path.iterdir()) == []

    def test_a_place_that_cannot_be_written(self, capsys, tmp_path):
        (tmp_path / "file").touch()
        save = ["--save", tmp_path / "file" / "x", "--save-interval", "1"]
        code, _, err = run(capsys, *MOCK, *FOUR, *save)
        assert code == 1
        assert "--save: got" in err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    cfg = small(save=str(folder), save_interval=1, device="cpu", transformer_impl="native")
    parts = setup_model(cfg, start(cfg, Launch()))
    save_checkpoint(
        cfg,
        ParallelState.single(),
        model=parts.model,
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        fp8=parts.fp8,
        progress=Progress(),
    )
    return folder


class TestLoading:
    ARGS = (
        "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4",
        "--seq-length", "16", "--max-position-embeddings", "24", "--vocab-size", "50",
        "--make-vocab-size-divisible-by", "16", "--micro-batch-size", "2", "--mock-data",
        "--global-batch-size", "8", "--train-iters", "2", "--lr", "1e-3", "--dry-run", *FOUR,
    )  # fmt: skip

    def test_a_checkpoint_that_fits_at_another_layout(self, capsys, checkpoint):
        args = [*PP2, "--use-distributed-optimizer", "--load", checkpoint]
        code, out, err = run(capsys, *self.ARGS, *args)
        assert code == 0, err
        assert "loading distributed checkpoint" in out
        assert "the contents of the checkpoint's files" in out

    def test_a_checkpoint_of_another_model(self, capsys, checkpoint):
        code, _, err = run(capsys, *self.ARGS, "--load", checkpoint, "--num-layers", "4")
        assert code == 1
        assert "--load: got" in err

    def test_an_optimizer_that_is_not_in_it(self, capsys, checkpoint):
        sgd = ["--optimizer", "sgd", "--load", checkpoint]
        code, _, err = run(capsys, *self.ARGS, *sgd)
        assert code == 1
        assert "do not fit the optimizer" in err
        code, _, _ = run(capsys, *self.ARGS, *sgd, "--no-load-optim")
        assert code == 0


class TestGroups:
    def test_those_of_4096_ranks(self):
        cfg = small(
            4096,
            num_layers=16,
            num_attention_heads=8,
            tensor_model_parallel_size=8,
            context_parallel_size=2,
            pipeline_model_parallel_size=8,
            global_batch_size=64,
        )
        assert checks.check_groups(cfg) == {
            "tp": (512, 8),
            "cp": (2048, 2),
            "dp": (128, 32),
            "pp": (512, 8),
            "dp-cp": (64, 64),
            "tp-cp": (256, 16),
            "tp-cp-dp": (8, 512),
        }

    def test_a_rank_that_is_missing(self, monkeypatch):
        monkeypatch.setattr(checks, "groups_of", lambda *_: [[0, 1], [2, 2]])
        with pytest.raises(MeshError, match=r"axis tp: got 2 groups"):
            checks.check_groups(small(4))

    def test_experts_on_two_stages(self, monkeypatch):
        right = checks.groups_of
        monkeypatch.setattr(
            checks,
            "groups_of",
            lambda token, *rest: right("pp" if token == "ep" else token, *rest),
        )
        with pytest.raises(MeshError, match="axis ep: got ranks 0, 2 of the stages 0, 1"):
            checks.check_groups(small(4, pipeline_model_parallel_size=2))

    def test_two_ranks_at_one_place(self, monkeypatch):
        monkeypatch.setattr(checks, "groups_of", lambda *_: [[0, 1], [2, 3]])
        with pytest.raises(MeshError, match="the same place"):
            checks.check_groups(small(4))


class TestSamples:
    def test_each_is_read_once(self):
        checks.check_samples(small(4, global_batch_size=24))

    def test_one_that_is_read_twice(self, monkeypatch):
        monkeypatch.setattr(Source, "first_sample", lambda self, start, mb, dp: start + 2 * mb)
        with pytest.raises(DataError, match="read 24 times"):
            checks.check_samples(small(4, global_batch_size=24))


class TestCheckpointBlocks:
    FIELDS = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "swiglu": True,
        "ffn_hidden_size": 48,
    }

    def world(self, **fields):
        return World(small(16, **{**self.FIELDS, **fields}))

    @pytest.mark.parametrize(
        "fields",
        [{}, {"use_distributed_optimizer": False}, {"untie_embeddings_and_output_weights": True}],
    )
    def test_every_element_once(self, fields):
        world = self.world(**fields)
        stored = checks.check_checkpoint(world.stages, world.different)
        assert stored.kinds == ("param", "exp_avg", "exp_avg_sq")
        whole = sum(p.numel() for p in setup_model_of(small(**self.only_the_model(fields))))
        assert stored.parameters == whole

    def only_the_model(self, fields):
        parallel = ("use_distributed_optimizer", *(n for n in self.FIELDS if "parallel" in n))
        return {k: v for k, v in {**self.FIELDS, **fields}.items() if k not in parallel}

    @pytest.mark.parametrize("etp", [1, 2])
    def test_experts(self, etp):
        experts = {
            "num_experts": 8, "moe_router_topk": 2, "add_bias_linear": False,
            "expert_model_parallel_size": 4, "expert_tensor_parallel_size": etp,
        }  # fmt: skip
        world = self.world(**experts)
        stored = checks.check_checkpoint(world.stages, world.different)
        alone = {**experts, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
        whole = sum(p.numel() for p in setup_model_of(small(**self.only_the_model(alone))))
        assert stored.parameters == whole
        indices = {
            param: param.expert_index
            for param in world.stages[0].parts.model.parameters()
            if hasattr(param, "expert_index")
        }
        assert set(indices.values()) == {0, 1}  # as before
        param = next(iter(indices))
        param.expert_index = 1
        with pytest.raises(CheckpointError, match="experts"):
            checks.check_checkpoint(world.stages, world.different)

    def test_a_parameter_that_is_cut_along_the_wrong_dimension(self):
        world = self.world()
        weight = dict(world.stages[0].parts.model.named_parameters())[
            "decoder.layers.0.mlp.linear_fc2.weight"
        ]
        del weight.tensor_model_parallel
        with pytest.raises(CheckpointError, match="linear_fc2.weight"):
            checks.check_checkpoint(world.stages, world.different)

    def test_a_stage_that_is_missing(self):
        world = self.world()
        with pytest.raises(CheckpointError, match="do not cover it once"):
            checks.check_checkpoint(world.stages[:1], world.different[:1])

    @pytest.mark.parametrize("change", [(0, -1), (1, 0)])
    def test_replicas_that_own_an_element_twice_or_not_at_all(self, monkeypatch, change):
        world = self.world()
        buffer = world.stages[1].parts.ddp.buffers_by_axis[0]
        ranges_of = buffer.ranges_of

        def wrong(rank):
            found = ranges_of(rank)
            if rank == 1:
                param = next(p for p, span in found.items() if span.size > 2)
                span = found[param]
                found[param] = FlatRange(span.start + change[0], span.stop + change[1])
            return found

        monkeypatch.setattr(buffer, "ranges_of", wrong)
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.param"):
            checks.check_checkpoint(world.stages, world.different)

    def test_copies_of_an_embedding_that_are_cut_at_different_places(self, monkeypatch):
        world = self.world()
        buffer = world.stages[0].parts.ddp.buffers_by_axis[0]

        def all_on_the_first(rank):
            return {p: FlatRange(0, 0 if rank else p.numel()) for p in buffer.params}

        monkeypatch.setattr(buffer, "ranges_of", all_on_the_first)
        with pytest.raises(CheckpointError, match="cut at different places"):
            checks.check_checkpoint(world.stages, world.different)


def setup_model_of(cfg):
    return World(cfg).stages[0].parts.model.parameters()


class TestClasses:
    def test_ranks_that_hold_the_same_are_run_once(self):
        cfg = small(16, num_layers=8, pipeline_model_parallel_size=4, global_batch_size=64)
        world = World(cfg)
        assert len(world.different) == 3
        classes = world.classes()
        assert [c.pipeline_ranks for c in classes] == [(0,), (1,), (2,), (3,)]
        assert [c.peak.microbatches for c in classes] == [4, 3, 2, 1]
        assert [spans(ranks) for ranks, _ in world.communication()] == ["0", "1-2", "3"]
        assert sum(c.ranks for c in classes) == 16

    def test_layers_in_another_precision_are_something_else(self):
        fp8 = {"bf16": True, "fp8_format": "hybrid", "first_last_layers_bf16": True}
        cfg = small(
            4, num_layers=8, pipeline_model_parallel_size=4, global_batch_size=16, **fp8,
            untie_embeddings_and_output_weights=True, num_layers_at_start_in_bf16=3,
        )  # fmt: skip
        # Layers 0 1 | 2 3 | 4 5 | 6 7: BF16 are 0, 1, 2 and 7.
        assert len(World(cfg).different) == 4

    def test_more_microbatches_send_in_proportion(self):
        def sent(batch):
            cfg = small(2, tensor_model_parallel_size=2, global_batch_size=batch)
            ((_, rows),) = World(cfg).communication()
            return {(r.part, r.kind): r.count for r in rows}

        few, many = sent(4), sent(40)
        for key, count in few.items():
            times = 10 if key[0] in ("forward", "backward", "loss") else 1
            assert many[key] == count * times, key

    def test_numbers_as_ranges(self):
        assert spans([0, 2, 3, 4, 7]) == "0, 2-4, 7"


class TestLiveMemory:
    def test_views_count_once_and_freed_memory_not(self):
        place = ["a"]
        memory = LiveMemory(META, lambda: place[0])
        old = torch.empty(100, device=META)
        memory.ignore([old])
        with memory:
            kept = torch.empty(256, device=META)
            views = [kept.view(16, 16), kept[:10], old[3:]]
            torch.empty(1000, device=META)
            place[0] = "b"
            del kept, views
            other = torch.empty(3, device=META)
        assert memory.spans["a"].kept_bytes == 1024
        assert memory.spans["a"].peak_bytes == 1024 + 4000
        assert memory.spans["b"].kept_bytes == 12 - 1024
        assert memory.live_bytes == 12 == other.nbytes

    def test_what_autograd_keeps_counts_until_it_is_used(self):
        memory = LiveMemory(META)
        weight = torch.empty(64, 64, device=META, requires_grad=True)
        memory.ignore([weight])
        with memory:
            loss = (torch.empty(8, 64, device=META) @ weight).exp().sum()
            assert memory.live_bytes >= 2 * 8 * 64 * 4
            loss.backward()
            weight.grad = None
            del loss
        assert memory.live_bytes == 0

    def test_other_devices_do_not_count(self):
        memory = LiveMemory(META)
        with memory:
            kept = torch.ones(4)
        assert (memory.live_bytes, kept.numel()) == (0, 4)


class TestTheTable:
    def test_aligned_and_readable(self):
        rows = [Row("forward", "all_reduce", "tp", 8, 12, 3 << 20, 5 << 19, 5 << 19, 0)]
        assert lines(rows)[1] == "forward  all_reduce  tp        8     12  3.00 MiB        2.50 MiB"
        assert lines([]) == ["nothing is sent: there is one rank"]
        assert [readable(n) for n in (0, 1023, 1024, 3 << 30)] == [
            "0 B", "1023 B", "1.00 KiB", "3.00 GiB",
        ]  # fmt: skip

    def test_nothing_is_a_table_too(self):
        assert table({}) == ()
