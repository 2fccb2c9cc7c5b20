"""Choosing tokens, and continuing sequences: cached, batched, ended, bounded."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import DataError
from megatron.core.models.gpt.generation import Sampling, choose, generate
from tests.small_models import GQA, LLAMA, small_model, spread_weights

GREEDY = Sampling(temperature=0.0)


def chosen(logits, sampling, draws=300):
    """The set of tokens that are ever chosen."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits).expand(draws, -1)
    return set(choose(rows, sampling, generator).tolist())


def test_temperature_zero_takes_the_best():
    assert chosen([0.0, 3.0, 2.9], GREEDY) == {1}


def test_top_k_and_top_p_cut_the_tail():
    logits = [2.0, 1.9, 1.8, -1.0]
    assert chosen(logits, Sampling()) == {0, 1, 2, 3}
    assert chosen(logits, Sampling(top_k=2)) == {0, 1}
    # Probabilities 0.37 0.33 0.30 0.02: the first two have 0.7.
    assert chosen(logits, Sampling(top_p=0.5)) == {0, 1}
    assert chosen(logits, Sampling(top_p=1e-6)) == {0}
    assert chosen(logits, Sampling(top_k=1, temperature=5.0)) == {0}


def test_temperature_spreads_or_sharpens():
    def share(temperature):
        generator = torch.Generator().manual_seed(0)
        rows = torch.tensor([1.0, 0.0]).expand(4000, -1)
        picks = choose(rows, Sampling(temperature), generator)
        return (picks == 0).float().mean().item()

    for temperature in (0.5, 1.0, 4.0):
        expected = torch.tensor([1.0, 0.0]).div(temperature).softmax(-1)[0].item()
        assert share(temperature) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(DataError, match="--"):
        Sampling(**wrong)


def model_for(**settings):
    model, build = small_model(**settings)
    spread_weights(model)
    return model.eval(), build.config


def uncached(model, prompt, count):
    """Greedy continuation by a full forward pass for every token."""
    ids = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logits = model(tokens, torch.arange(len(ids))[None])[0, -1, : model.vocab_size]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("settings", [{}, {**LLAMA, **GQA}])
def test_a_batch_of_different_lengths_gives_what_each_gives_alone(settings):
    model, _ = model_for(**settings)
    prompts = [[3], [7, 1, 9, 4, 4], [2, 8]]
    together = generate(model, prompts, 10, GREEDY)
    for prompt, found in zip(prompts, together, strict=True):
        assert found == uncached(model, prompt, 10)
        assert found == generate(model, [prompt], 10, GREEDY)[0]


def test_ids_that_the_tokenizer_does_not_have_are_never_chosen():
    model, _ = model_for()
    known = min(generate(model, [[3], [7, 1]], 10, GREEDY)[0])
    hot = Sampling(temperature=1e6)  # every id is as probable as any other
    for sampling in (GREEDY, hot):
        found = generate(model, [[3], [7, 1]], 10, sampling, vocab_size=known)
        assert max(map(max, found)) < known
    found = generate(model, [[3]], 10, hot, vocab_size=model.vocab_size + 9)
    assert max(found[0]) < model.vocab_size


def test_a_sequence_ends_at_the_end_of_document_and_the_others_go_on():
    model, _ = model_for()
    plain = generate(model, [[3], [7, 1]], 10, GREEDY)
    end = plain[0][2]
    assert end not in plain[1][:4]
    ended = generate(model, [[3], [7, 1]], 10, GREEDY, eod=end)
    assert ended[0] == plain[0][: plain[0].index(end)]
    stop = plain[1].index(end) if end in plain[1] else 10
    assert ended[1] == plain[1][:stop]


def test_a_finished_sequence_stays_finished_while_the_others_go_on():
    model, _ = model_for()
    longer = generate(model, [[3]], 18, GREEDY)[0]
    late = next(t for i, t in enumerate(longer) if i >= 10 and t not in longer[:10])
    found = generate(model, [[3], [7, 1, 9, 4, 4, 2, 2, 6, 6]], 10, GREEDY, eod=late)
    assert found[0] == longer[:10]


def test_sampling_repeats_with_its_seed():
    model, _ = model_for()
    once = generate(model, [[3]], 20, Sampling(seed=1))
    assert once == generate(model, [[3]], 20, Sampling(seed=1))
    assert once != generate(model, [[3]], 20, Sampling(seed=2))


def test_padding_of_the_vocabulary_is_never_chosen():
    model, config = model_for()
    assert config.padded_vocab_size > config.vocab_size
    with torch.no_grad():
        model.embedding.word_embeddings.weight[config.vocab_size :] = 50.0
        model.decoder.final_layernorm.bias.fill_(1.0)
    hot = Sampling(temperature=100.0)
    found = generate(model, [[3]] * 20, 20, hot)
    assert max(max(ids) for ids in found) < config.vocab_size


@pytest.mark.parametrize(
    ("prompts", "count", "named"),
    [
        ([[1] * 20], 5, "Use at most 4"),
        ([[1] * 24], 1, "Shorten the prompt"),
        ([[1], []], 1, "--prompt"),
        ([], 1, "--prompt"),
        ([[1]], 0, "--max-new-tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_any_work(prompts, count, named):
    model, _ = model_for()
    with pytest.raises(DataError, match=named):
        generate(model, prompts, count, GREEDY)


def test_the_last_position_can_be_used():
    model, config = model_for()
    count = config.max_position_embeddings - 1
    assert len(generate(model, [[5]], count, GREEDY)[0]) == count
