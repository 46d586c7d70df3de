"""What a piece of code allocates, inside custom operators too."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Memory:
    """Bytes: the largest single allocation, and the peak of what was alive at once beyond the start."""

    largest: int
    peak: int


def memory(function: Callable[[], object]) -> Memory:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        largest = max(largest, event.nbytes())
        alive += event.nbytes()
        peak = max(peak, alive)
    assert largest, "the profiler saw no allocation"
    return Memory(largest, peak)
