"""The command line: flags, files, precedence, notices, refusals, help and --print-config."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.config import ConfigError, make_config
from megatron.config.cli import SPELLINGS, build_parser, parse
from megatron.config.schema import SPECS

ROOT = Path(__file__).resolve().parents[2]
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
FULL = f"{TINY} --lr 1e-3 --train-iters 3 --mock-data --vocab-size 64"


def read(line, world_size=1, **kw):
    return parse(shlex.split(line), world_size, **kw)


def config(line, world_size=1, **kw):
    return read(line, world_size, **kw)[0]


def problems(line, world_size=1):
    with pytest.raises(ConfigError) as caught:
        read(line, world_size)
    return [str(problem) for problem in caught.value.problems]


class TestFlags:
    def test_command_line_equals_python(self):
        line = (
            f"{TINY} --bf16 --fp8-format hybrid --fp8-amax-history-len 16 --lr 3e-4 --swiglu"
            " --group-query-attention --num-query-groups 2 --disable-bias-linear --split 9,1,0"
            " --data-path 0.5 a 0.5 b --vocab-size 100 --tokenizer-type NullTokenizer"
        )
        assert config(line) == make_config(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            seq_length=32,
            bf16=True,
            fp8_format="hybrid",
            fp8_amax_history_len=16,
            lr=3e-4,
            swiglu=True,
            group_query_attention=True,
            num_query_groups=2,
            add_bias_linear=False,
            split="9,1,0",
            data_path=["0.5", "a", "0.5", "b"],
            vocab_size=100,
            tokenizer_type="NullTokenizer",
        )

    @pytest.mark.parametrize("name", [n for n, s in SPECS.items() if not s.setting.derived])
    def test_every_flag_sets_its_field(self, name):
        spec = SPECS[name]
        value = (spec.setting.choices or ("7",))[-1]
        for flag in spec.flags:
            tokens = [flag] if spec.kind is bool else [flag, str(value)]
            reader_value = _read_only(tokens)[name]
            if spec.kind is bool:
                assert reader_value is (not spec.default)
            else:
                assert reader_value == ((str(value),) if spec.many else str(value))
        for flag in spec.inverse_flags:
            assert _read_only([flag])[name] is spec.default

    @pytest.mark.parametrize(
        ("line", "name", "value"),
        [
            ("--micro_batch_size 4", "micro_batch_size", 4),
            ("--micro-batch-size=4", "micro_batch_size", 4),
            ("--override-opt_param-scheduler", "override_opt_param_scheduler", True),
            ("--override-opt-param-scheduler", "override_opt_param_scheduler", True),
            ("--use-checkpoint-opt_param-scheduler", "use_checkpoint_opt_param_scheduler", True),
            ("--save x --persistent-save-interval 5", "save_interval", 5),
            ("--transformer-impl local", "transformer_impl", "native"),
            ("--split '99,1,0'", "split", "99,1,0"),
            ("--split \"'99,1,0'\"", "split", "'99,1,0'"),
            ("--seed 5 --seed 6", "seed", 6),
            ("--bf16 --no-bf16", "bf16", False),
            ("--encoder-seq-length 32", "seq_length", 32),
            ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
            ("--norm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ],
    )
    def test_spellings(self, line, name, value):
        base = TINY.replace("--seq-length 32", "") if "seq" in line else TINY
        assert getattr(config(f"{base} {line}"), name) == value

    def test_flags_are_not_abbreviated(self):
        assert "Did you mean --num-layers?" in problems("--num-layer 3")[0]

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("--seed", ["--seed", "takes a value"]),
            ("--seed 1 2", ["--seed", "got 2", "takes one value"]),
            ("--bf16 true", ["--bf16", "is a switch", "Remove true"]),
            ("lonely", ["lonely", "lone value"]),
            ("-tp 2", ["-tp", "two dashes"]),
            ("--fp8-formt hybrid", ["Did you mean --fp8-format?"]),
            ("--tensor-parallel-size 2", ["Did you mean --tensor-model-parallel-size?"]),
            ("--zebra 1 2", ["--zebra: got 1 2", "There is no such flag"]),
            ("--config", ["--config", "YAML"]),
            ("--fp8-format hybrd", ["Did you mean hybrid?"]),
            ("--num-layers two", ["'two'", "whole number"]),
            ("--cp-comm-type ring", ["--cp-comm-type: got 'ring'. The choices are p2p"]),
            ("--cp-comm-type p2 p2", ["got ('p2', 'p2')"]),
            ("--tensor-model-parallel-size 2", ["Start a multiple of 2 processes with torchrun"]),
        ],
    )
    def test_mistakes(self, line, words):
        text = "\n".join(problems(line))
        for word in words:
            assert word in text

    def test_all_kinds_of_problems_together(self, tmp_path):
        overlay = tmp_path / "a.yaml"
        overlay.write_text("num_layer: 3\nfp16: true\n")
        found = "\n".join(
            problems(
                f"--config {overlay} --config {tmp_path}/none.yaml --bf16 --zebra"
                " --moe-latent-size 2 --tp-comm-overlap --lr fast"
            )
        )
        for part in (
            f"num_layer: got 3 in {overlay}",
            "none.yaml",
            "--fp16, --bf16",
            "--zebra",
            "--moe-latent-size",
            "--tp-comm-overlap",
            "'fast'",
        ):
            assert part in found


def _read_only(tokens):
    """Return the fields that tokens set, before any rule."""
    from megatron.config.cli import _Reader

    reader = _Reader(1)
    reader.read(tokens)
    assert not reader.problems
    return reader.fields


class TestFiles:
    def test_yaml_equals_command_line(self, tmp_path):
        file = tmp_path / "a.yaml"
        file.write_text(
            "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n"
            "lr: 1e-3\nbf16: true\nadd_bias_linear: false\ndata_path: [a, b]\nvocab_size: 64\n"
        )
        line = f"{TINY} --lr 1e-3 --bf16 --disable-bias-linear --data-path a b --vocab-size 64"
        assert config(f"--config {file}") == config(line)

    def test_precedence(self, tmp_path):
        first, second = tmp_path / "1.yaml", tmp_path / "2.yaml"
        first.write_text("seed: 1\nlog_interval: 1\neval_iters: 1\nbf16: true\n")
        second.write_text("seed: 2\nlog_interval: 2\n")
        cfg = config(f"--seed 3 --config {first} --no-bf16 --config {second}")
        assert (cfg.seed, cfg.log_interval, cfg.eval_iters, cfg.bf16) == (3, 2, 1, False)
        assert config(f"--config {second} {first}").log_interval == 1

    def test_a_default_on_the_command_line_still_wins(self, tmp_path):
        file = tmp_path / "a.yaml"
        file.write_text("lr_warmup_iters: 20\n")
        assert config(f"--config {file} --lr-warmup-iters 0").lr_warmup_iters == 0

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("num_layer: 3", ["num_layer", "Did you mean num_layers?", "a.yaml"]),
            ("model:\n  num_layers: 3", ["model", "not nested"]),
            ("- 3", ["maps names to values"]),
            ("a: [", ["not YAML"]),
            ("tp_comm_overlap: true", ["--tp-comm-overlap", "whole matrices"]),
            ("lr: fast", ["--lr", "'fast' in", "a.yaml"]),
            ("fp8_recipe: custom\nfp8_format: hybrid", ["Custom quantizers"]),
            ("world_size: 3", ["follows from other settings"]),
        ],
    )
    def test_mistakes(self, tmp_path, text, words):
        file = tmp_path / "a.yaml"
        file.write_text(text)
        found = "\n".join(problems(f"--config {file}"))
        for word in words:
            assert word in found

    def test_retired_names_work_in_files_and_python(self, tmp_path):
        file = tmp_path / "a.yaml"
        file.write_text("use_mcore_models: true\nuse_rotary_position_embeddings: true\n")
        cfg, notices = read(f"--config {file}")
        assert cfg.position_embedding_type == "rope"
        assert any("--use-mcore-models" in line for line in notices)
        assert make_config(fp8="hybrid").fp8_format == "hybrid"

    def test_an_empty_file_is_fine(self, tmp_path):
        file = tmp_path / "a.yaml"
        file.write_text("# nothing\n")
        assert config(f"{TINY} --config {file}") == config(TINY)


class TestPrintConfig:
    def test_round_trip(self, tmp_path, capsys):
        base = tmp_path / "base.yaml"
        base.write_text("lr: 3e-4\nmin_lr: 3.0e-5\n")
        line = (
            f"--config {base} {TINY} --bf16 --fp8-format hybrid --disable-bias-linear"
            " --data-path 0.5 'a b' --vocab-size 64 --weight-decay 1e-5 --fp8-wgrad"
            " --tensor-model-parallel-size 2"
        )
        with pytest.raises(SystemExit) as left:
            read(f"{line} --print-config", 4)
        assert left.value.code == 0
        printed = capsys.readouterr().out
        saved = tmp_path / "printed.yaml"
        saved.write_text(printed)
        assert config(f"--config {saved}", 4) == config(line, 4)
        assert f"lr: 0.0003  # {base}" in printed
        assert "bf16: true  # command line" in printed
        assert "# num_microbatches: 1" in printed

    def test_every_setting_is_shown(self, capsys):
        with pytest.raises(SystemExit):
            read(f"{FULL} --print-config")
        shown = set(re.findall(r"^(?:# )?(\w+):", capsys.readouterr().out, re.MULTILINE))
        assert set(SPECS) <= shown

    def test_a_broken_run_prints_no_config(self, capsys):
        assert problems("--print-config --fp16 --bf16")
        assert capsys.readouterr().out == ""


class TestHelp:
    def test_help_is_instant_and_needs_no_torch(self):
        code = (
            "import sys\n"
            "from megatron.config.cli import parse\n"
            "try:\n    parse(['--help'])\n"
            "except SystemExit as left:\n    assert left.code == 0\n"
            "heavy = {'torch', 'numpy', 'transformers', 'numba'} & set(sys.modules)\n"
            "sys.exit(f'imported {heavy}' if heavy else 0)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert "--fp8-format" in done.stdout

    def test_package_import_is_empty(self):
        for package in ("megatron", "megatron/core"):
            text = (ROOT / package / "__init__.py").read_text()
            assert "import" not in text.replace("import-", "")

    def test_help_names_every_flag(self):
        text = build_parser().format_help()
        for spec in SPECS.values():
            for flag in spec.flags:
                assert flag in text
        assert "%(default" not in text

    def test_spellings_are_dashed(self):
        assert all("_" not in flag for flag in SPELLINGS)


class TestContinuing:
    SAVED = {
        **make_config(
            num_layers=3,
            hidden_size=48,
            num_attention_heads=3,
            seq_length=32,
            lr=5e-4,
            global_batch_size=8,
            vocab_size=77,
            mock_data=True,
            seed=9,
            fp8_format="hybrid",
            save="old",
            save_interval=4,
            bf16=True,
        ).to_dict()
    }

    def saved(self, load, step):
        self.asked = (load, step)
        return self.SAVED if load == "run" else None

    def test_a_run_without_a_size_continues_the_saved_one(self):
        cfg, notices = read("--load run --fp8-format hybrid --bf16", saved_config=self.saved)
        assert self.asked == ("run", None)
        assert (cfg.num_layers, cfg.hidden_size, cfg.lr, cfg.seed) == (3, 48, 5e-4, 9)
        assert (cfg.global_batch_size, cfg.vocab_size, cfg.fp8_format) == (8, 77, "hybrid")
        assert cfg.save is None
        assert any("continuing the run saved in run" in line for line in notices)

    def test_leaving_fp8_out_goes_on_without_it(self):
        assert config("--load run", saved_config=self.saved).fp8_format is None
        assert config("--load run", saved_config=self.saved).bf16

    def test_flags_win(self):
        line = "--load run --ckpt-step 4 --lr 1e-3 --seed 1 --fp16 --train-samples 800"
        cfg = config(line, saved_config=self.saved)
        assert self.asked == ("run", 4)
        assert (cfg.lr, cfg.seed, cfg.params_dtype) == (1e-3, 1, "float16")
        assert (cfg.train_samples, cfg.train_iters) == (800, 100)
        cfg = config("--load run --data-path a --vocab-size 50", saved_config=self.saved)
        assert (cfg.mock_data, cfg.vocab_size) == (False, 50)

    def test_the_layout_may_change(self):
        cfg = config("--load run --tensor-model-parallel-size 3", 3, saved_config=self.saved)
        assert cfg.padded_vocab_size == 384

    def test_a_given_size_is_not_mixed_with_a_saved_one(self):
        assert config(f"{TINY} --load run", saved_config=self.saved).lr == 1.5e-4

    def test_nothing_saved(self):
        cfg = config("--load other", saved_config=self.saved)
        assert cfg.num_layers == 24
        assert cfg.use_checkpoint_args

    def test_without_a_lookup_the_loader_decides(self):
        cfg, notices = read("--load run")
        assert cfg.use_checkpoint_args
        assert any("checkpoint in run" in line for line in notices)


TUTORIAL = {
    "5B on 8 GPUs": (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
        " --num-layers 24 --hidden-size 4096 --num-attention-heads 32"
        " --seq-length 2048 --micro-batch-size 4 --global-batch-size 256"
        " --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
        " --train-iters 500 --log-interval 10 --bf16",
        8,
    ),
    "TP 8": (
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --sequence-parallel"
        " --bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024"
        " --fp8-amax-compute-algo max --fp8-margin 0 --fp8-wgrad",
        8,
    ),
    "70B": (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
        " --fp8-format hybrid --fp8-amax-history-len 1024"
        " --fp8-amax-compute-algo max --fp8-margin 0 --fp8-wgrad --num-layers 80"
        " --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --micro-batch-size 2"
        " --global-batch-size 512 --lr 1.5e-4 --clip-grad 1.5 --bf16",
        8,
    ),
    "resume in FP8": (
        "--load /checkpoints/iter_10000 --fp8-format hybrid --fp8-amax-history-len 1024"
        " --fp8-amax-compute-algo max --bf16",
        1,
    ),
    "loss scaling": (
        "--fp8-format hybrid --no-fp16-lgs --accumulate-allreduce-grads-in-fp32",
        1,
    ),
}


class TestLaunchLines:
    @pytest.mark.parametrize("name", TUTORIAL)
    def test_runs_as_written(self, name):
        line, world_size = TUTORIAL[name]
        cfg = config(line, world_size)
        assert cfg.fp8_format == "hybrid"
        assert make_config(world_size, **cfg.given_dict()) == cfg

    def test_a_pipeline_layout_on_the_command_line(self):
        cfg = config(
            "--pipeline-model-parallel-size 2 --num-layers 6 --hidden-size 64"
            " --num-attention-heads 4 --pipeline-model-parallel-layout Et|(tt|)*2tL"
            " --global-batch-size 4",
            2,
        )
        assert cfg.virtual_pipeline_model_parallel_size == 2

    def test_selective_recomputation_takes_no_number_of_layers(self):
        line = "--recompute-activations --recompute-granularity selective --recompute-num-layers 24"
        (problem,) = problems(line)
        assert "Remove --recompute-num-layers" in problem

    def test_yaml_dump_of_every_line_loads(self):
        for line, world_size in TUTORIAL.values():
            assert yaml.safe_load(config(line, world_size).to_yaml())
