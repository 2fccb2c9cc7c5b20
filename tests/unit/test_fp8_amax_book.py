"""The book of scales: layout, registration, checkpoint, replay."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import CheckpointError, PrecisionError
from megatron.core.fp8.amax import AmaxBook, Slots, fit_history
from megatron.core.fp8.recipe import DelayedScaling, Role


def book_of(*paths, length=4, **kwargs):
    book = AmaxBook(DelayedScaling(amax_history_len=length, **kwargs))
    return book, [book.register(path) for path in paths]


def stage(book, **amax_by_path):
    for path, amax in amax_by_path.items():
        for direction in ("forward", "backward"):
            book.history[0, book.columns(path, direction)] = amax


def test_one_buffer_with_each_layers_columns_side_by_side():
    book, _ = book_of("a", "b")
    assert book.history.shape == (4, 10)
    assert book.names() == [
        "a.input", "a.weight", "a.output", "b.input", "b.weight", "b.output",
        "a.grad_output", "a.grad_input", "b.grad_output", "b.grad_input",
    ]  # fmt: skip
    view = book.columns("b", "backward")
    assert (view.start, view.stop) == (8, 10)
    shared = {
        view.amax_history.untyped_storage().data_ptr()
        for path in book.paths()
        for view in (Slots(book, path).forward, Slots(book, path).backward)
    }
    assert shared == {book.history.untyped_storage().data_ptr()}


def test_views_are_live_in_both_directions():
    book, (a, _) = book_of("a", "b")
    a.forward.amax_history[2, 1] = 7.0
    assert book.history[2, 1] == 7.0
    book.scale[1] = 3.0
    assert a.forward.scale[1] == 3.0
    assert a.forward.scale_inv[1] == pytest.approx(1 / 3)


def test_late_registration_keeps_what_is_there():
    book, (a,) = book_of("a")
    stage(book, a=2.0)
    book.sync()
    scales = a.forward.scale.tolist(), a.backward.scale.tolist()
    late = book.register("late")
    assert (a.forward.scale.tolist(), a.backward.scale.tolist()) == scales
    assert a.backward.amax_history[-1].tolist() == [2, 2]
    assert late.forward.scale.tolist() == [1, 1, 1]
    assert late.backward.scale.tolist() == [1, 1]
    stage(book, late=2.0)
    book.sync()
    assert late.backward.scale.tolist() == [28672, 28672]


def test_grouped_layers_have_columns_for_every_product():
    book = AmaxBook(DelayedScaling(amax_history_len=2))
    slots = book.register("experts", fwd_columns=6, bwd_columns=4)
    assert slots.of(Role.INPUT, gemm=1).index() == 3
    assert slots.of(Role.GRAD_OUTPUT, gemm=1).index() == 8
    assert book.names()[3] == "experts.input[1]"


def test_same_path_twice_is_refused():
    book, _ = book_of("a")
    with pytest.raises(PrecisionError, match="'a'"):
        book.register("a")


def test_released_columns_start_anew():
    book, (a, _) = book_of("a", "b")
    stage(book, a=2.0, b=4.0)
    book.sync()
    book.release("a")
    assert book.names()[0] == ""
    again = book.register("again")
    assert book.history.shape[1] == 10
    assert again.forward.scale.tolist() == [1, 1, 1]
    assert again.forward.amax_history.abs().max() == 0


def test_directions_update_apart():
    book, (a,) = book_of("a")
    stage(book, a=2.0)
    book.sync(direction="forward")
    assert a.forward.scale[0] == 224
    assert a.backward.scale[0] == 1
    assert book.generation == 1
    book.sync(direction="backward")
    assert a.backward.scale[0] == 28672
    assert book.generation == 1  # what was cast with forward scales is still good


def test_replay_uses_earlier_scales():
    book, (a,) = book_of("a")
    slot = a.of(Role.INPUT)
    before = book.snapshot()
    stage(book, a=2.0)
    book.sync()
    assert slot.scale == 224
    with book.replay(before):
        assert slot.scale == 1
        assert book.generation_in_use == 0
    assert slot.scale == 224
    assert book.snapshot() is book.snapshot()  # one copy a generation


def test_empty_book_synchronises():
    book, _ = book_of()
    book.sync()
    assert book.state_dict() == {}


# -- checkpoint -----------------------------------------------------------------------------------


def trained():
    book, slots = book_of("layers.2", "layers.10")
    for amax in (2.0, 8.0, 4.0):
        stage(book, **{"layers.2": amax, "layers.10": 2 * amax})
        book.sync()
    return book, slots


def test_state_round_trip_in_any_order():
    book, _ = trained()
    other, _ = book_of("layers.10", "layers.2")
    assert other.load_state_dict(book.state_dict()) == []
    for path in book.paths():
        for direction in ("forward", "backward"):
            mine, theirs = book.columns(path, direction), other.columns(path, direction)
            assert torch.equal(book.history[:, mine], other.history[:, theirs])
            assert torch.equal(book.scale[mine], other.scale[theirs])


def test_saved_state_is_a_copy():
    book, _ = trained()
    saved = book.state_dict()
    book.history.fill_(9.0)
    assert saved["layers.2"]["amax_history_fwd"].max() == 8.0


def test_shape_of_the_state_does_not_depend_on_the_number_of_steps():
    book, _ = trained()
    before = {k: v.shape for k, v in book.state_dict()["layers.2"].items()}
    for _ in range(20):
        stage(book, **{"layers.2": 1.0})
        book.sync()
    assert {k: v.shape for k, v in book.state_dict()["layers.2"].items()} == before


@pytest.mark.parametrize(
    ("length", "want", "words"),
    [
        (6, [0, 2, 8, 4, 0, 0], "zero rows are added"),
        (3, [0, 8, 4], "the newest rows are kept"),
        (2, [0, 4], "the newest rows are kept"),
        (1, [0], "the newest rows are kept"),
    ],
)
def test_other_history_length_keeps_scales_and_newest_rows(length, want, words):
    book, _ = trained()
    other, (slots, _) = book_of("layers.2", "layers.10", length=length)
    (message,) = other.load_state_dict(book.state_dict())
    assert words in message
    assert slots.forward.amax_history[:, 0].tolist() == want
    assert slots.forward.scale[0] == 56


def test_fitting_a_history_keeps_the_staging_row():
    history = torch.tensor([[5.0], [1.0], [2.0], [3.0]])
    assert fit_history(history, 2).flatten().tolist() == [5, 3]
    assert fit_history(history, 5).flatten().tolist() == [5, 1, 2, 3, 0]
    assert fit_history(history, 4) is history


def test_missing_layers_are_all_named_and_nothing_is_loaded():
    book, _ = trained()
    other, (_, known, _) = book_of("layers.3", "layers.2", "layers.20")
    with pytest.raises(CheckpointError, match=r"layers\.3, layers\.20"):
        other.load_state_dict(book.state_dict())
    assert known.forward.scale.tolist() == [1, 1, 1]


def test_other_number_of_columns_is_refused():
    book, _ = trained()
    other = AmaxBook(DelayedScaling(amax_history_len=4))
    other.register("layers.2", fwd_columns=6, bwd_columns=4)
    with pytest.raises(CheckpointError, match="3 columns"):
        other.load_state_dict(book.state_dict())


def test_more_layers_than_this_process_has_is_fine():
    book, _ = trained()
    other, (slots,) = book_of("layers.10")
    other.load_state_dict(book.state_dict())
    assert slots.forward.scale[0] == 28
