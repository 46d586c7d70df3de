"""Timing and memory of functions on one device, side by side in one process."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable

import torch

Functions = dict[str, Callable[[], object]]
SECONDS, MOST_ROUNDS = 0.3, 60


class Timer:
    """Runs functions in turn, A B C A B C ..., so that clocks and neighbours drift for all of them alike."""

    def __init__(self, device: torch.device, rounds: int = 7, warmup: int = 2):
        self.device, self.rounds, self.warmup = device, rounds, warmup
        # Cleared before every run: the L2 cache is cold, and the host is ahead of the device by the 0.25 ms that this
        # takes, as it is in training, where the model's own kernels are still queued when the loss is called.
        self.flush = torch.empty(1 << 30, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def medians(self, functions: Functions) -> dict[str, float]:
        """Median milliseconds of each, without Python's garbage collector, as timeit does."""
        warm = [self._round(functions) for _ in range(self.warmup)]
        more = self._short(warm[-1]) if self.device.type == "cuda" else 0
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            rounds = [self._round(functions) for _ in range(more + max(self.rounds, more))][more:]
        finally:
            if collecting:
                gc.enable()
        return {name: statistics.median(r[name] for r in rounds) for name in functions}

    @staticmethod
    def _short(times: dict[str, float]) -> int:
        """Rounds that take SECONDS: short functions warm up that long and run that long, since clocks rise slowly."""
        return min(MOST_ROUNDS, math.ceil(SECONDS / max(1e-3 * sum(times.values()), 1e-6)))

    def _round(self, functions: Functions) -> dict[str, float]:
        return {name: self.once(function) for name, function in functions.items()}

    def once(self, function: Callable[[], object]) -> float:
        if self.flush is None:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self.flush.zero_()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Most bytes that the function holds at once beyond what was there before it, on CUDA."""
    function()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
