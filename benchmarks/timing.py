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
    """Runs functions in turn, A B C A B C ..., so that clocks and neighbours drift for all of them alike.

    On CUDA nothing waits between runs, as in Triton's ``do_bench`` and in training: the host is ahead of the device as
    far as a function lets it be, by its syncs and by its own time, which shows where it is longer than the device's.
    """

    def __init__(self, device: torch.device, rounds: int = 7, warmup: int = 2):
        self.device, self.rounds, self.warmup = device, rounds, warmup
        # Cleared before every run, so that the L2 cache is cold.
        self.flush = torch.empty(1 << 28, dtype=torch.uint8, device=device) if device.type == "cuda" else None

    def medians(self, functions: Functions) -> dict[str, float]:
        """Median milliseconds of each, without Python's garbage collector, as timeit does."""
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            warm = self._rounds(functions, self.warmup)
            more = self._short(warm[-1]) if warm and self.device.type == "cuda" else 0
            rounds = self._rounds(functions, more + max(self.rounds, more))[more:]
        finally:
            if collecting:
                gc.enable()
        return {name: statistics.median(r[name] for r in rounds) for name in functions}

    @staticmethod
    def _short(times: dict[str, float]) -> int:
        """Rounds that take SECONDS: short functions warm up that long and run that long, since clocks rise slowly."""
        return min(MOST_ROUNDS, math.ceil(SECONDS / max(1e-3 * sum(times.values()), 1e-6)))

    def _rounds(self, functions: Functions, count: int) -> list[dict[str, float]]:
        started = [{name: self._start(function) for name, function in functions.items()} for _ in range(count)]
        return [{name: milliseconds() for name, milliseconds in round_.items()} for round_ in started]

    def _start(self, function: Callable[[], object]) -> Callable[[], float]:
        """Run it, or have the device do so; the time comes by a call."""
        if self.flush is None:
            begin = time.perf_counter()
            function()
            milliseconds = (time.perf_counter() - begin) * 1e3
            return lambda: milliseconds
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        begin.record()
        function()
        end.record()

        def elapsed() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed


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
