"""What the pages on Transformer Engine and on porting say is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.config import ConfigError
from megatron.config.cli import parse
from megatron.core.backends import te_calls
from tests.contract.te_sources import RELEASES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("transformer-engine.md", "porting-from-megatron.md")
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 64 --train-iters 1 --lr 1e-3 --bf16"
)


def read(page):
    return (DOCS / page).read_text(encoding="utf-8")


def parsed(flags):
    return parse([*BASE.split(), *flags.split()])


@pytest.mark.parametrize("block", BLOCK.findall(read(PAGES[0])))
def test_code_runs_as_it_stands(block, capsys):
    exec(compile(block, "docs/transformer-engine.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([\w./-]+)\)", read(page)):
        assert (DOCS / target).exists(), target


def test_the_releases_are_those_of_the_code():
    text = read("transformer-engine.md")
    oldest, newest = (".".join(map(str, v)) for v in (te_calls.OLDEST, te_calls.NEWEST_CHECKED))
    assert f"release {oldest} or newer" in text
    assert f"a release newer than {newest} runs" in text
    assert len(RELEASES) == 7
    assert "seven releases" in text


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid --fp8-wgrad",
        "--fp8-format hybrid --no-fp8-wgrad",
        "--no-fp16-lgs",
        "--fp8-format hybrid --fp8-interval 1",
        "--fp8-hybrid",
        "--fp8-format hybrid --fp8-recipe delayed --first-last-layers-bf16",
        "--use-mcore-models --use-flash-attn --calculate-per-token-loss",
        "--layernorm-epsilon 1e-6",
        "--transformer-impl local",
        "--fp8-format e4m3 --fp8-recipe mxfp8",
        "--fp8-format hybrid --fp8-recipe blockwise",
    ],
)
def test_flags_that_the_page_calls_accepted(flags):
    parsed(flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--overlap-param-gather",
        "--moe-shared-expert-overlap",
        "--tp-comm-overlap",
        "--tp-comm-overlap --no-tp-comm-split-rs",
        "--fp8-format hybrid --fp8-param-gather",
        "--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 1",
        "--fp8-format hybrid --fp8-recipe custom",
        "--recompute-granularity selective --recompute-num-layers 1",
        "--ckpt-format torch",
        "--spec a b",
        "--fp8-formt hybrid",
    ],
)
def test_flags_that_the_page_calls_errors(flags):
    with pytest.raises(ConfigError):
        parsed(flags)


def test_defaults_that_the_page_names():
    config, _ = parsed("--fp8-format hybrid")
    assert (config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (1, "most_recent")
    assert config.fp8_wgrad
