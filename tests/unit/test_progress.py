"""Counters of a run that went back."""

from __future__ import annotations

from megatron.training.progress import Progress


def at(iteration, consumed, **fields):
    return Progress(iteration=iteration, consumed_train_samples=consumed, **fields)


def test_going_back_keeps_the_place_in_the_data():
    earlier = at(3, 12, consumed_valid_samples=4, nan_iterations=1).to_dict()
    now = at(5, 20, consumed_valid_samples=8, nan_iterations=2)
    assert now.go_back(earlier) == (12, 20)
    assert (now.iteration, now.consumed_train_samples, now.skipped_train_samples) == (3, 20, 8)
    assert (now.consumed_valid_samples, now.nan_iterations) == (4, 1)
    now.consumed_train_samples, now.iteration = 28, 5
    assert now.go_back(earlier) == (20, 28)  # what is left out in addition
    assert (now.skipped_train_samples, now.skipped_ranges) == (16, [[12, 28]])
    later = now.to_dict()
    later["iteration"], later["consumed_train_samples"] = 7, 44
    now.consumed_train_samples = 48
    assert now.go_back(later) == (44, 48)
    assert (now.skipped_train_samples, now.skipped_ranges) == (20, [[12, 28], [44, 48]])
    assert earlier["skipped_ranges"] == []
    again = Progress()
    again.update(now.to_dict())
    assert again == now


def test_samples_at_the_end_of_the_data():
    # 20 samples were planned for five iterations of four; eight were left out.
    done = at(3, 20, skipped_train_samples=8, skipped_ranges=[[4, 8], [12, 16]])
    assert done.next_samples(20, 4) == 0
    done.consumed_train_samples = 24
    assert done.next_samples(20, 4) == 8  # 4 to 7 were left out
    assert done.next_samples(28, 4) == 24  # there is more
    done.consumed_train_samples = 16
    assert done.next_samples(20, 4) == 16
    # Without anything left out the source says that the data are at their end.
    assert at(5, 20).next_samples(20, 4) == 20
    # The batch size has changed since: batches keep their phase.
    other = at(3, 18, skipped_train_samples=4, skipped_ranges=[[2, 6]])
    assert other.next_samples(21, 4) == 6
