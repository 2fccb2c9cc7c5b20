"""Do pipeline schedules take as long as the simulator says, and rank in its order?

A rank's forward, backward and weight pass are timed in one process, and a transfer between two idle
ranks. The simulator predicts the time of a step from these figures; the same schedules run on
forked gloo ranks through the project's own runner and transfers. Both orders are printed, and one
JSON line at the end.

    python benchmarks/schedules.py                     on 2 and on 4 ranks, about a minute
    python benchmarks/schedules.py --ranks 2 --steps 20 --microbatches 8

Every rank has one thread. With a core for each rank (--compute auto) stages really multiply
matrices. With more ranks than cores they would wait for cores rather than for each other, so there
a stage sleeps for the time that its pass was measured to take: the order is then that of the
schedules and their transfers, not of the processor. All contenders exist at once and take one step
each in turn, so that they share the machine's moods; the slowest rank counts, and the median of its
steps.

Contenders have the same work and the same microbatches: `gpipe`, `1f1b`, `interleaved` with two
stages a rank, each half as long, and `zb-h1`. Predictions closer than --tie count as equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from ranks import Step, in_turn, run
from torch import Tensor, nn

from megatron.core.fp8 import Fp8State, linear
from megatron.core.fp8.weight_grads import WeightGradQueue
from megatron.core.mesh import MeshSizes, ParallelState
from megatron.core.pipeline_parallel.p2p import Pipes
from megatron.core.pipeline_parallel.runner import Runner
from megatron.core.pipeline_parallel.schedule import Schedule, generate, lower
from megatron.core.pipeline_parallel.simulate import simulate

# name -> (kind, stages a rank)
CONTENDERS = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved": ("1f1b", 2),
    "zb-h1": ("zb-h1", 1),
}


@dataclass(frozen=True)
class Costs:
    """Seconds of a rank's passes on one microbatch.

    Attributes:
        forward: Forward pass.
        backward: Backward pass without the weights' gradients.
        weight: The weights' gradients.
        transfer: Sending a microbatch's activations to the next rank.
    """

    forward: float
    backward: float
    weight: float
    transfer: float = 0.0

    def simulated(self, share: float) -> dict[str, float]:
        """The simulator's arguments for stages that do `share` of a rank's work."""
        return {
            "forward_cost": share * self.forward,
            "backward_cost": share * (self.backward + self.weight),
            "weight_cost": share * self.weight,
            "transfer_cost": self.transfer,
        }


class Layers(nn.Module):
    """Square linear layers one after the other, with fp32 gradient accumulation.

    Args:
        count: Number of layers.
        width: Rows and columns of each weight.
        queue: Where weight gradients may be put off.
    """

    def __init__(self, count: int, width: int, queue: WeightGradQueue) -> None:
        super().__init__()
        self.queue = queue
        self.precision = Fp8State.disabled(params_dtype=torch.float32).for_linear("layer")
        self.weights = nn.ParameterList(
            torch.randn(width, width) / width**0.5 for _ in range(count)
        )
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to `x [s, b, width]`."""
        for weight in self.weights:
            x = linear(x, weight, None, self.precision, later=self.queue)
        return x


class _Sleep(torch.autograd.Function):
    """Takes as long as the passes of a stage, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, costs: Costs, queue: WeightGradQueue
    ) -> Tensor:
        ctx.weight, ctx.costs, ctx.queue = weight, costs, queue
        time.sleep(costs.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.costs.backward)
        if ctx.queue.is_collecting:
            ctx.queue.put(ctx.weight, lambda seconds=ctx.costs.weight: time.sleep(seconds))
        else:
            time.sleep(ctx.costs.weight)
        return grads[0], None, None, None


class Sleeper(nn.Module):
    """A stage that sleeps.

    Args:
        costs: For how long.
        queue: Where weight gradients may be put off.
    """

    def __init__(self, costs: Costs, queue: WeightGradQueue) -> None:
        super().__init__()
        self.costs, self.queue, self.weight = costs, queue, nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep for a forward pass."""
        slept: Tensor = _Sleep.apply(x, self.weight, self.costs, self.queue)
        return slept


class Work:
    """A rank's stages, as the runner wants them.

    Args:
        stages: Number of the stage -> its module.
        last: Number of the last stage.
        shape: Of the activations.
    """

    def __init__(self, stages: dict[int, nn.Module], last: int, shape: tuple[int, ...]) -> None:
        self.stages, self.last, self.shape = stages, last, shape

    def forward(self, stage: int, microbatch: int, received: Tensor | None) -> Tensor:
        """Run a stage; the last one returns a scalar."""
        if received is None:
            received = torch.full(self.shape, 1.0 / (microbatch + 1), requires_grad=True)
        output: Tensor = self.stages[stage](received)
        return output.sum() if stage == self.last else output

    def sync_gradients(self) -> None:
        """There is one replica."""

    def sync_amax(self) -> None:
        """There is no FP8."""


def measure_costs(args: argparse.Namespace) -> Costs:
    """Time a rank's passes in this process; medians."""
    queue = WeightGradQueue()
    layers = Layers(args.layers, args.width, queue)
    found: list[tuple[float, float, float]] = []
    for i in range(args.steps + 2):
        x = torch.randn(args.tokens, 1, args.width, requires_grad=True)
        clock = [time.perf_counter()]
        loss = layers(x).sum()
        clock.append(time.perf_counter())
        with queue.collect(i):
            loss.backward()
        clock.append(time.perf_counter())
        queue.run(i)
        clock.append(time.perf_counter())
        found.append((clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]))
    return Costs(*(statistics.median(column) for column in zip(*found[2:], strict=True)))


def measure_transfer(rank: int, args: argparse.Namespace) -> float:
    """Time one way between the first two ranks, while the others wait."""
    parcel, ways = torch.zeros(args.tokens, 1, args.width), []
    for _ in range(10):
        dist.barrier()
        before = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                dist.send(parcel, 1 - rank)
            elif rank == 1 - sender:
                dist.recv(parcel, sender)
        ways.append((time.perf_counter() - before) / 2)
    return statistics.median(ways[2:])


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return a contender's schedule with transfers."""
    kind, stages = CONTENDERS[name]
    return lower(generate(microbatches, pipeline_size=ranks, virtual_size=stages, kind=kind))


def predict(name: str, ranks: int, microbatches: int, costs: Costs) -> float:
    """Return the seconds of a step according to the simulator."""
    schedule = schedule_of(name, ranks, microbatches)
    return simulate(schedule, **costs.simulated(1.0 / CONTENDERS[name][1])).makespan


def contender(
    name: str, mesh: ParallelState, args: argparse.Namespace, costs: Costs, asleep: bool
) -> Step:
    """Return what runs one step of a schedule on this rank."""
    per_rank = CONTENDERS[name][1]
    queue = WeightGradQueue()
    share = Costs(costs.forward / per_rank, costs.backward / per_rank, costs.weight / per_rank)
    stages: dict[int, nn.Module] = {
        mesh.pp.rank + i * mesh.pp.size: Sleeper(share, queue)
        if asleep
        else Layers(args.layers // per_rank, args.width, queue)
        for i in range(per_rank)
    }
    shape = (args.tokens, 1, args.width)
    work = Work(stages, per_rank * mesh.pp.size - 1, shape)
    pipes = Pipes(mesh, shape, torch.float32, torch.device("cpu"))
    runner = Runner(work, transport=pipes, weight_grads=queue)
    actions = schedule_of(name, mesh.pp.size, args.microbatches)[mesh.pp.rank]

    def step(_: int) -> float:
        runner.run(actions)
        return 0.0

    return step


def measure(
    rank: int, ranks: int, args: argparse.Namespace, costs: Costs, asleep: bool
) -> dict[str, Any]:
    """Return the seconds of a transfer, and of all contenders' steps."""
    mesh = ParallelState.build(MeshSizes(world=ranks, pp=ranks, vpp=2), rank, ranks)
    transfer = measure_transfer(rank, args)
    steps = {name: contender(name, mesh, args, costs, asleep) for name in CONTENDERS}
    found = in_turn(steps, args.steps)
    return {"transfer": transfer, "steps": {name: row["s"] for name, row in found.items()}}


def disagreements(
    predicted: dict[str, float], measured: dict[str, float], tie: float
) -> list[tuple[str, str]]:
    """Return the pairs that the simulator tells apart and that came in the other order."""
    return [
        (fast, slow)
        for fast, slow in itertools.permutations(predicted, 2)
        if predicted[fast] * (1.0 + tie) < predicted[slow] and measured[fast] >= measured[slow]
    ]


def compare(ranks: int, args: argparse.Namespace, costs: Costs, asleep: bool) -> dict[str, Any]:
    """Run on so many ranks and print both orders."""
    found = run(measure, ranks, args, costs, asleep)
    measured, transfer = found["steps"], found["transfer"]
    costs = replace(costs, transfer=transfer)
    predicted = {name: predict(name, ranks, args.microbatches, costs) for name in CONTENDERS}
    doing = "stages sleep for the measured times" if asleep else "stages compute"
    print(f"\n{ranks} ranks, {args.microbatches} microbatches, {doing}")
    print(f"a transfer: {transfer * 1e3:.1f} ms")
    print(f"{'schedule':14}{'predicted ms':>14}{'measured ms':>14}{'ratio':>8}")
    for name in sorted(predicted, key=predicted.__getitem__):
        ratio = measured[name] / predicted[name]
        print(f"{name:14}{predicted[name] * 1e3:14.1f}{measured[name] * 1e3:14.1f}{ratio:8.3f}")
    print("predicted order:", " < ".join(sorted(predicted, key=predicted.__getitem__)))
    print("measured order: ", " < ".join(sorted(measured, key=measured.__getitem__)))
    wrong = disagreements(predicted, measured, args.tie)
    texts = [f"{fast} was not faster than {slow}" for fast, slow in wrong]
    print("orders agree" if not wrong else f"orders differ: {'; '.join(texts)}")
    return {
        "asleep": asleep,
        "transfer": transfer,
        "predicted": predicted,
        "measured": measured,
        "agree": not wrong,
    }


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=4, help="a multiple of the ranks")
    parser.add_argument("--layers", type=int, default=4, help="linear layers of a rank, even")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compute", choices=("auto", "real", "sleep"), default="auto")
    parser.add_argument(
        "--tie", type=float, default=0.02, help="predictions closer than this share are equal"
    )
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if an order differs."""
    args = read_arguments()
    torch.set_num_threads(1)  # forked ranks of a parent with an OpenMP team would hang
    costs = measure_costs(args)
    print(
        f"a rank's passes, one thread: forward {costs.forward * 1e3:.1f} ms, backward "
        f"{costs.backward * 1e3:.1f} ms, weights {costs.weight * 1e3:.1f} ms"
    )
    cores = len(os.sched_getaffinity(0))
    found = {}
    for ranks in args.ranks:
        asleep = args.compute == "sleep" or (args.compute == "auto" and ranks > cores)
        found[ranks] = compare(ranks, args, costs, asleep)
    print(f"\nload average {os.getloadavg()[0]:.1f} on {cores} cores")
    print(json.dumps({"settings": vars(args), "costs": vars(costs), "found": found}))
    return 0 if all(one["agree"] for one in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
