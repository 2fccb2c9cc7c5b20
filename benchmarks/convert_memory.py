"""How much memory does converting a model take?

Writes a Llama of random weights in HuggingFace format, shard by shard, converts it to a checkpoint
and back, each in a process of its own, and reports the largest resident memory that the operating
system saw. Needs three times the model on disk; everything it wrote is removed.

    python benchmarks/convert_memory.py
    python benchmarks/convert_memory.py --layers 4 --dir /scratch
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron.training import hf_map
from megatron.training.hf_config import fields_from_hf
from megatron.training.hf_files import write_weights
from megatron.training.hf_rows import every_tensor
from megatron.training.safetensors_file import Planned

ROOT = Path(__file__).resolve().parents[1]
CONVERT = ROOT / "tools" / "checkpoint" / "convert.py"
_BLOCK = 1 << 20  # random elements that are drawn; a tensor repeats them with other signs and sizes


def config(layers: int) -> dict[str, object]:
    """The config.json of a model shaped like Llama 3 8B."""
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "bos_token_id": 128000, "eos_token_id": 128001, "torch_dtype": "bfloat16",
    }  # fmt: skip


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    """A tensor of its own for every seed: small weights, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    block = torch.randn(min(numel, _BLOCK), generator=generator).mul_(0.02).bfloat16()
    if len(shape) == 1:
        return block.float().add_(1.0).bfloat16().reshape(shape)
    out = torch.empty(numel, dtype=torch.bfloat16)
    for i, start in enumerate(range(0, numel, _BLOCK)):
        part = out[start : start + _BLOCK]
        torch.mul(block[: len(part)], (-1.0) ** i * (1 + i % 7 / 8), out=part)
    return out.reshape(shape)


def write_model(directory: Path, layers: int) -> int:
    """Write the model and return its number of parameters."""
    directory.mkdir()
    made = config(layers)
    fields = fields_from_hf(made)
    planned = []
    for row, at in every_tensor(hf_map.rows_for(fields, "llama"), layers):
        for name, shape in zip(row.names, row.shapes, strict=True):
            make = partial(values, shape, len(planned))
            planned.append(Planned(at.of(name), shape, make))
    write_weights(directory, planned, torch.bfloat16)
    (directory / "config.json").write_text(json.dumps(made))
    return sum(torch.Size(p.shape).numel() for p in planned)


def convert(loader: str, saver: str, load: Path, save: Path, *flags: str) -> tuple[float, float]:
    """Run the tool; return its largest resident memory in GiB and its seconds."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(CONVERT), "--model-type", "GPT", "--loader", loader, "--saver", saver,
         "--load-dir", str(load), "--save-dir", str(save), *flags]
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the conversion ended with {process.returncode}")
    return usage.ru_maxrss / 2**20, time.monotonic() - start


def same_files(first: Path, second: Path) -> bool:
    """Whether all weight files agree byte for byte."""
    names = sorted(p.name for p in first.glob("*.safetensors"))
    return bool(names) and all(filecmp.cmp(first / n, second / n, shallow=False) for n in names)


def main() -> None:
    """Make, convert, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dir", type=Path, default=None, help="where to work (default: /tmp)")
    parser.add_argument("--flags", nargs="*", default=["--verify"], help="further flags")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="convert_", dir=args.dir))
    try:
        numel = write_model(work / "hf", args.layers)
        flags = [f"--{flag.lstrip('-')}" for flag in args.flags]
        there = convert("hf", "megatron", work / "hf", work / "ckpt", *flags)
        back = convert("megatron", "hf", work / "ckpt", work / "back", *flags)
        result = {
            "parameters": numel,
            "model_gib": round(2 * numel / 2**30, 2),
            "to_megatron": {"peak_rss_gib": round(there[0], 2), "seconds": round(there[1])},
            "to_huggingface": {"peak_rss_gib": round(back[0], 2), "seconds": round(back[1])},
            "bitwise": same_files(work / "hf", work / "back"),
        }
        print(json.dumps(result))
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
