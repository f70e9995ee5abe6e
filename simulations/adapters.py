"""What aggregating adapters costs, in milliseconds a module on one core, and where the best factors are put.

    python -m simulations.adapters --size 4096 --rank 16 --clients 10

Factors are those of a first round: A near the initialisation that all clients share, B small.
"""

import argparse
import time
from collections.abc import Callable

import torch

from rotfed.adapters.factors import Factors, Stack, aggregation_error, factor_mean, optimal, rotation


def clients_of(size: int, rank: int, count: int, seed: int = 0) -> tuple[list[Factors], Factors]:
    """Float32 factors of `count` clients, and those that all of them started from."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    A = normal(rank, size) / size**0.5
    clients = [Factors(1e-3 * normal(size, rank), A + 1e-3 * normal(rank, size)) for _ in range(count)]
    return clients, Factors(torch.zeros(size, rank), A)


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of `run`, after one that does not count."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def measure(size: int, rank: int, count: int, repeats: int) -> dict[str, float]:
    """Milliseconds a module by method."""
    clients, anchor = clients_of(size, rank, count)
    shares = [1 / count] * count
    best = optimal(clients, shares, anchor=anchor)

    def errors() -> None:
        """What a round measures: the error of the method and of the mean of factors, from one pair of QRs."""
        stack = Stack.of(clients, shares)
        for coefficients in (stack.best(rank), stack.mean(), None):
            stack.norm(coefficients)

    runs: dict[str, Callable[[], object]] = {
        "mean": lambda: factor_mean(clients, shares),
        "rotation of all clients": lambda: [rotation(client, anchor) for client in clients],
        "optimal": lambda: optimal(clients, shares, anchor=anchor),
        "the errors of a round": errors,
        "the error of any result": lambda: aggregation_error(best, clients, shares),
    }
    return {name: milliseconds(run, repeats) for name, run in runs.items()}


def moved(size: int, rank: int, count: int) -> dict[str, float]:
    """How far A is from where the round began, relative to its size, by the frame of the best factors."""
    clients, anchor = clients_of(size, rank, count)
    shares = [1 / count] * count
    even = optimal(clients, shares)
    turn = rotation(even, anchor)
    frames = {
        "nearest frame": optimal(clients, shares, anchor=anchor),
        "even split, nearest rotation": even.turned(turn, turn.mT),
        "mean of factors": factor_mean(clients, shares),
    }
    return {name: float((frame.A - anchor.A).norm() / anchor.A.norm()) for name, frame in frames.items()}


def main() -> None:
    """Print the costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="in and out dimension of the module")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.size} x {options.size}, rank {options.rank}, {options.clients} clients, float32, one core:")
    for name, cost in measure(options.size, options.rank, options.clients, options.repeats).items():
        print(f"  {name}: {cost:.1f} ms")
    print("A after the round, from where it began:")
    for name, share in moved(options.size, options.rank, options.clients).items():
        print(f"  {name}: {share:.1%}")


if __name__ == "__main__":
    main()
