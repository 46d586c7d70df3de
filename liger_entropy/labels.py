"""The labels of a call: coded for the loops, checked, and counted, with the one host sync of a call."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends
from .equations import IGNORED, INVALID
from .ops import define, fake, on_device, traced


class Labels:
    """``coded [T]`` is there at once; what is read from the device, when it is asked for.

    Args:
        target: ``[T]`` int64. temperature: ``[T]`` or None, checked along with it.
        drop: whether the kept rows are to be found. check: whether to raise for labels and temperatures.
    """

    def __init__(self, target, temperature, ignore_index: int, vocab_size: int, backend: str, drop: bool, check: bool):
        self.drop, self.inspection = drop, None
        arguments = target, temperature, ignore_index, vocab_size, backend, drop or check, check
        if traced(target):
            self.coded, self.order, self.count = inspect_rows(*arguments)
            return
        self.later = target.is_cuda and not drop
        self.inspection = Inspection(*arguments)
        self.coded = self.inspection.coded

    @property
    def are_waited_for(self) -> bool:
        """The device has nothing to do until the host knows the kept rows, but for what is started on all of them."""
        return self.inspection is not None and self.drop and self.inspection.read and self.coded.is_cuda

    def kept_rows(self) -> tuple[Tensor | None, Tensor | None]:
        """Order and count of the kept rows, None where all take part. Raises for bad labels, unless `check` will."""
        if self.inspection is None:
            return (self.order, self.count) if self.drop else (None, None)
        kept = None if self.later else self.inspection.kept()
        if kept is None or not self.drop or kept == self.coded.shape[0]:
            return None, None
        return self.inspection.order()[:kept], torch.tensor(kept, device="cpu")

    def check(self) -> None:
        """Raise for bad labels, where no row is dropped and the kernels are on their way before a GPU is waited for."""
        if self.inspection is not None and self.later:
            self.inspection.kept()


class Inspection:
    """The labels of a call on their way through the device.

    coded [T]: labels as the loops want them.
    """

    def __init__(self, target, temperature, ignore_index, vocab_size, backend, read, check):
        self.target, self.check, self.bounds = target, check, (ignore_index, vocab_size)
        capturing = target.is_cuda and torch.cuda.is_current_stream_capturing()
        self.read = read and target.numel() > 0 and not capturing
        with on_device(target):
            self.coded, self.counts = backends.get(backend).inspect(
                target, temperature, ignore_index, vocab_size, self.read
            )

    def kept(self) -> int:
        """How many tokens are kept, by a host sync, or all of them if that is not to be read. Raises for a bad label
        if it is to be checked."""
        ignored, bad, cold = self.counts() if self.read else (0, 0, 0)
        if self.check:
            _raise_for(self.target, self.coded if bad else None, cold, *self.bounds)
        return self.target.numel() - ignored

    def order(self) -> Tensor:  # [T]
        """The tokens, kept ones first."""
        return torch.argsort((self.coded == IGNORED).to(torch.uint8), stable=True)


@define(
    "inspect_rows",
    "(Tensor target, Tensor? temperature, int ignore_index, SymInt vocab_size, str backend, bool read, bool check)"
    " -> (Tensor, Tensor, Tensor)",
)
def _inspect_rows(*arguments):
    """coded [T]; order [T], not filled if all tokens are kept; count [] on the CPU, how many are."""
    inspection = Inspection(*arguments)
    kept, coded = inspection.kept(), inspection.coded
    order = inspection.order() if kept < coded.shape[0] else coded.new_empty(coded.shape)
    return coded, order, torch.tensor(kept, device="cpu")


def _raise_for(target: Tensor, coded: Tensor | None, cold: int, ignore_index: int, vocab_size: int) -> None:
    if coded is not None:
        position = int((coded == INVALID).to(torch.uint8).argmax())
        raise ValueError(
            f"target: label {int(target[position])} at flat position {position} is neither in [0, {vocab_size}) "
            f"nor ignore_index={ignore_index}"
        )
    if cold:
        raise ValueError(f"temperature: {cold} values are not positive and finite; every token's temperature must be")


@fake("inspect_rows")
def _(target, temperature, ignore_index, vocab_size, backend, read, check):
    return torch.empty_like(target), torch.empty_like(target), torch.empty((), dtype=torch.int64)


inspect_rows = torch.ops.liger_entropy.inspect_rows.default
