"""When KV in object storage pays: bandwidth at which reading takes as long as computing, and reuses that pay storage.

    python benchmarks/economics.py [--storage 0.0225] [--read 0.4] [--gpu-hour 2.5] [--tokens 512]

A paper model, measured nowhere: a token costs 2 x parameters operations, and KV has the size of its codec. Models,
their effective operations a second, and prices are inputs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    parameters: float
    layers: int
    heads: int
    """KV heads."""
    width: int
    operations: float
    """Effective, a second, of all GPUs of a prefill."""
    gpus: int = 1

    def compute_s(self) -> float:
        """Of a token."""
        return 2 * self.parameters / self.operations

    def num_bytes(self, codec: str) -> float:
        """Of a token's KV."""
        return 2 * self.layers * self.heads * self.width * CODECS[codec]


CODECS = {"bfloat16": 2.0, "int8": 1.04}
MODELS = {
    "0.5B on an H100": Model(0.36e9, 24, 2, 64, 400e12),
    "8B on an H100": Model(7.5e9, 32, 8, 128, 400e12),
    "8B on an L4": Model(7.5e9, 32, 8, 128, 60e12),
    "70B on 4 H100": Model(69e9, 80, 8, 128, 1.6e15, 4),
}
RATIO = 0.2
"""Of tokens that are recomputed all the same."""


def share_in_full(read_s: float, compute_s: float, ratio: float = RATIO) -> float:
    """Share of the tokens to compute in full while the rest is read, so that both end together."""
    return min(1.0, max(0.0, (read_s - ratio * compute_s) / ((1 - ratio) * compute_s + read_s)))


def reuses_that_pay(model: Model, codec: str, tokens: int, storage: float, read: float, gpu_hour: float) -> float:
    """Reuses of a chunk a month that save what a month of its storage costs; infinite if a read costs more."""
    saved = tokens * model.compute_s() * (1 - RATIO) * model.gpus * gpu_hour / 3600 - read / 1e6
    return tokens * model.num_bytes(codec) / 1e9 * storage / saved if saved > 0 else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=float, default=0.0225, help="$ a GB and month")
    parser.add_argument("--read", type=float, default=0.4, help="$ a million reads")
    parser.add_argument("--gpu-hour", type=float, default=2.5, help="$ an hour of one GPU")
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--gigabits", type=float, default=10.0, help="a second, of the line")
    given = parser.parse_args()
    for name, model in MODELS.items():
        for codec in CODECS:
            size, compute_s = model.num_bytes(codec), model.compute_s()
            share = share_in_full(8 * size / (given.gigabits * 1e9), compute_s)
            pays = reuses_that_pay(model, codec, given.tokens, given.storage, given.read, given.gpu_hour)
            months = [count * given.tokens * size / 1e9 * given.storage for count in (1e6, 1e7)]
            print(
                f"{name:16} {codec:9} reading pays above {8 * size / compute_s / 1e9:5.1f} Gb/s; at "
                f"{given.gigabits:g} Gb/s compute {share:.0%} in full; a month of 1 and 10 million chunks "
                f"${months[0]:,.0f} and ${months[1]:,.0f}; a chunk pays from {pays:,.0f} reuses a month"
            )


if __name__ == "__main__":
    main()
