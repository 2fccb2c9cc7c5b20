"""tools/quantize.py on small models: what it writes, how it is read, what it refuses."""

from __future__ import annotations

import json
import re

import pytest
import torch

from megatron.core.mesh import ParallelState
from megatron.training import hf_files
from megatron.training.hf_sources import HfSource, MegatronSource
from megatron.training.perplexity import total_loss, windows
from megatron.training.progress import Progress
from megatron.training.quantization.grid import Grid
from megatron.training.quantization.packed import PackedSource, is_quantized
from megatron.training.quantization.streaming import Batch, LayerStream, watch_inputs
from megatron.training.quantization.streaming import run as run_part
from tests.saving import save_checkpoint
from tests.small_models import GQA, LLAMA, build_model, small_config, spread_weights
from tools import quantize

MOE = {
    **LLAMA, "num_experts": 6, "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16, "qk_layernorm": True, "moe_layer_freq": "([0]*1+[1]*1)",
}  # fmt: skip
TEXT = "".join(chr(32 + (i * i) % 17) for i in range(400))


@pytest.fixture(scope="module", params=["dense", "tied", "experts"])
def model(request, tmp_path_factory):
    """A checkpoint with random weights, its model, and texts."""
    root = tmp_path_factory.mktemp(request.param)
    settings = {
        "dense": {**LLAMA, **GQA},
        "tied": {**LLAMA, "untie_embeddings_and_output_weights": False},
        "experts": MOE,
    }[request.param]
    config = small_config(
        **settings, vocab_size=257, tokenizer_type="ByteLevelTokenizer", save=str(root / "ckpt"),
        save_interval=1,
    )  # fmt: skip
    built, build = build_model(config)
    spread_weights(built, std=0.15)
    if request.param == "experts":  # of two pairs one is above zero, and the last two never are
        with torch.no_grad():
            router = built.decoder.layers[1].mlp.router.weight
            router[1] = router[0]
            router[2:4] = -router[:2]
            router[4:] = 0.0
    save_checkpoint(
        config, ParallelState.single(), model=built, optimizer=None, scheduler=None,
        fp8=build.fp8, progress=Progress(iteration=1),
    )  # fmt: skip
    text = root / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    return root, built, text, request.param


def arguments(model, out, *more):
    root, _, text, _ = model
    return [
        "--load", str(root / "ckpt"), "--save-dir", str(out), "--tokenizer-type",
        "ByteLevelTokenizer", "--eval-text", str(text), "--json", *more,
    ]  # fmt: skip


def run(capsys, args):
    code = quantize.main([str(a) for a in args])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out)


def packed_loss(source, out, grid, text):
    return LayerStream(PackedSource(source, out, grid), torch.device("cpu")).total_loss(text)


def test_streamed_loss_is_that_of_the_whole_model(model, tmp_path, capsys):
    root, built, _, _ = model
    report = run(capsys, arguments(model, tmp_path / "q", "--method", "int8"))
    tokens = torch.tensor(list(TEXT.encode())).numpy()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(parameter.bfloat16())
    total, count = total_loss(built, tokens, 24, 8)
    found = report["perplexity"]
    assert found["tokens"] == count == len(TEXT) - 1
    # the same fp32 operations on the same bf16 weights
    assert found["models"]["bf16"]["lm loss"] == pytest.approx(total / count, rel=1e-6)


def test_what_is_watched_is_what_the_weights_multiply(model):
    stream = LayerStream(MegatronSource.find(model[0] / "ckpt"), torch.device("cpu"))
    batches = stream.embed([torch.tensor([list(TEXT.encode())[:24]])])
    for number in range(2):  # the second one has the experts, if there are any
        layer, seen, made = stream.layer(number), {}, {}
        for step in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
            watch_inputs(layer, step, seen.__setitem__)
        for name, module in layer.named_modules():
            if ".linear_" in name:
                module.register_forward_hook(
                    lambda module, args, out, name=name, made=made: made.setdefault(name, out)
                )
        batches = [Batch(b.tokens, run_part(layer, b)) for b in batches]
        weights, products = dict(layer.named_parameters()), {}
        for name, inputs in seen.items():
            products.setdefault(name.rpartition(".")[0], []).append(inputs @ weights[name].t())
        for name, out in made.items():
            expected = out[0] if isinstance(out, tuple) else out
            # the same product, perhaps in another order
            torch.testing.assert_close(torch.cat(products[name]), expected, rtol=1e-5, atol=1e-6)
        assert len(seen) == (14 if model[3] == "experts" and number == 1 else 4)


@pytest.mark.parametrize("method", ["int8", "int4-rtn", "gptq"])
def test_files_say_what_the_report_says(model, tmp_path, capsys, method):
    root, _, text, kind = model
    out = tmp_path / "q"
    more = [] if method == "int8" else ["--group-size", "16"]
    more += ["--calibration-text", text, "--act-order"] if method == "gptq" else []
    report = run(capsys, arguments(model, out, "--method", method, *more))
    config = json.loads((out / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    bits = 8 if method == "int8" else 4
    assert (scheme["num_bits"], scheme["group_size"]) == (bits, report["group_size"])
    assert scheme["actorder"] == ("weight" if method == "gptq" else None)
    source = HfSource(tmp_path / "q-bf16")
    stored = hf_files.HfWeights(out)
    for row in source.rows():
        if is_quantized(row) and row.num_experts == 0:
            name = row.names[0].format(i=0)
            assert f"{name}_packed" in stored or (row.layers and 0 not in row.layers)
            assert name not in stored
    kept = config["quantization_config"]["ignore"]
    assert "lm_head" in kept
    assert ("model.layers.1.mlp.gate" in kept) == (kind == "experts")
    losses = {n: m["lm loss"] for n, m in report["perplexity"]["models"].items()}
    assert list(losses) == ["bf16", "int8", "int4-rtn", "gptq"][: 2 + (bits == 4) + (
        method == "gptq")]  # fmt: skip
    assert abs(losses["int8"] - losses["bf16"]) < 0.01
    tokens = torch.tensor(list(TEXT.encode())).numpy()
    grid = Grid(bits, report["group_size"])
    total, count = packed_loss(source, out, grid, list(windows(tokens, 24, 8)))
    assert losses[method] == total / count
    assert json.loads((out / quantize.REPORT).read_text()) == report


def test_gptq_is_nearer_on_its_text_and_names_experts_without_tokens(model, tmp_path, capsys):
    _, _, text, kind = model
    args = arguments(model, tmp_path / "q", "--method", "gptq", "--group-size", "-1")
    report = run(capsys, [*args, "--calibration-text", text])
    assert report["calibration_tokens"] == len(TEXT) // 24 * 24
    seen = [w for w in report["weights"] if w["rounding"] == "gptq"]
    worse = [w["name"] for w in seen if w["output_error"] > w["nearest_output_error"]]
    assert not worse
    unseen = [w["name"] for w in report["weights"] if w["rounding"] == "nearest"]
    block = "decoder.layers.1.mlp.experts.linear_fc"
    expected = [f"{block}{n}.weight{e}" for n in (1, 2) for e in (4, 5)]
    assert unseen == (expected if kind == "experts" else [])


def test_transformers_computes_the_same(model, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    if model[3] == "experts":
        pytest.skip("transformers has no packed form for fused experts")
    out = tmp_path / "q"
    run(capsys, arguments(model, out, "--method", "int4-rtn", "--group-size", "16"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    theirs(torch.tensor([[1, 2]]))  # unpacked on its first call at the latest
    torch.nn.Module.float(theirs)  # its own method refuses
    tokens = torch.tensor([list(TEXT.encode())[:25]])
    with torch.no_grad():
        logits = theirs.eval()(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:], reduction="sum")
    source = HfSource(tmp_path / "q-bf16")
    total, _ = packed_loss(source, out, Grid(4, 16), [tokens])
    assert total == pytest.approx(float(loss), rel=1e-5)  # fp32 in another order


REFUSED = [
    (["--method", "gptq"], "--calibration-text, --calibration-data-path: got nothing"),
    (["--method", "int8", "--damping", "0.1"], "--damping: got 0.1. --method int8 needs no"),
    (["--method", "int8", "--group-size", "16"], "--group-size: got 16. INT8 has one scale"),
    (["--method", "int4-rtn", "--group-size", "5"], r"--group-size: got 5. .*48 inputs"),
    (["--method", "int4-rtn", "--group-size", "-7"], "--group-size: got -7."),
    (
        ["--method", "int4-rtn", "--group-size", "-1", "--seq-length", "99"],
        "--seq-length: got 99. The model has 24",
    ),
    (
        ["--method", "gptq", "--group-size", "-1", "--calibration-text", "nowhere"],
        "--calibration-text: got nowhere",
    ),
    (["--method", "gptq", "--damping", "-1"], "--damping: got -1.0."),
]


@pytest.mark.parametrize("model", ["dense"], indirect=True)
def test_what_cannot_work_is_refused(model, tmp_path, capsys):
    for number, (flags, expected) in enumerate(REFUSED):
        args = arguments(model, tmp_path / str(number), *flags)
        assert quantize.main(args) == 1
        assert re.search(expected, capsys.readouterr().err), flags
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert quantize.main(arguments(model, tmp_path / "full", "--method", "int8")) == 1
    assert "--save-dir: got" in capsys.readouterr().err
    (tmp_path / "full").rename(tmp_path / "new-bf16")
    assert quantize.main(arguments(model, tmp_path / "new", "--method", "int8")) == 1
    assert f"with --load {tmp_path / 'new-bf16'}, or name" in capsys.readouterr().err
    store = ["--method", "int8", "--save-dir", "s3://bucket/q"]
    assert quantize.main(arguments(model, tmp_path / "new", *store)) == 1
    assert "--save-dir: got s3://bucket/q. A model is written to" in capsys.readouterr().err
    same = ["--method", "int8", "--bf16-dir", str(tmp_path / "new")]
    assert quantize.main(arguments(model, tmp_path / "new", *same)) == 1
    assert "Two models need two directories" in capsys.readouterr().err
