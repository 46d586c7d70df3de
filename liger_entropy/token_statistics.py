"""linear_token_statistics: flattening, dropping of ignored tokens, and the call of the operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import backends, distributed, dtensor, ops, planner
from .checks import (
    check_is_given,
    check_tensors,
    checked_temperature,
    checked_vocab_size,
    finite,
    integer,
    positive,
    product_dtype,
)
from .distributed import Facts, Layout
from .engine import Forward, Settings, Sizes
from .labels import Labels
from .planner import ComputeOptions
from .products import Products


@dataclass(frozen=True)
class TokenStatistics:
    """Per-token statistics of the distribution ``softmax(z)``. All have the shape of the target, but those that
    were not asked for, which are empty.

    logprob, entropy, lse and smooth_logprob are fp32 (fp64 for fp64 inputs), in nats, and differentiable in input,
    weight and bias; prediction is int64. At ignored tokens they are exactly 0, and -1 for prediction.
    """

    logprob: Tensor  # log p_y
    entropy: Tensor  # -sum_j p_j log p_j
    lse: Tensor  # log sum_j e^(z_j)
    smooth_logprob: Tensor  # 1/V sum_j c_j log p_j, c = class_weight or 1
    prediction: Tensor  # argmax_j z_j, the first of equals


_FIELDS = tuple(field.name for field in dataclasses.fields(TokenStatistics))


def linear_token_statistics(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int | None = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor | None = 1.0,
    process_group: Any = None,
    options: ComputeOptions | None = None,
    vocab_size: int | None = None,
    fields: Collection[str] | None = None,
) -> TokenStatistics:
    """Log-probability, entropy and more of every token, without the ``[T, V]`` logits.

    The logits are ``z = softcap(logit_scale (input weight^T + bias)) / temperature`` with
    ``softcap(a) = softcap tanh(a / softcap)``; the formulas are in ``equations.py``.

    Args:
        input: ``[..., D]`` hidden states, fp16, bf16, fp32 or fp64, any strides.
        linear_weight: ``[V, D]``, dtype of the input (under autocast both may differ and the products run in the
            autocast dtype).
        target: ``[...]`` class indices of any integer dtype, as many as there are hidden states.
        linear_bias: ``[V]``, any float dtype; added in fp32.
        class_weight: ``[V]`` weights c of smooth_logprob, or one per row of a sharded weight; not differentiable.
        ignore_index: label of tokens that take no part; None means -100.
        softcap: c > 0, or None for none.
        logit_scale: factor on the logits before the softcap.
        temperature: > 0, a number or a tensor with one value per token; not differentiable. None means 1. Under
            torch.compile a number is a constant of the graph, as softcap and logit_scale are, and a tensor is not.
        process_group: the ranks that share the vocabulary (a ProcessGroup or a DeviceMesh of one dimension), or None:
            the weight is whole and nothing is communicated. Each rank passes its rows of weight and bias, in the order
            of the ranks, of any number and also none, and the same input, target and options; all get the same result.
            The gradient of input is complete on every rank, those of weight and bias are the rank's slices. The ranks
            compare their arguments first and raise rather than wait for each other. A DTensor weight brings its group
            along: ``Shard(0)`` on one dimension of its mesh, ``Replicate()`` on the others, with bias and input
            DTensors that fit; gradients have the arguments' placements, and a plain input counts as replicated.
        options: :class:`ComputeOptions`.
        vocab_size: V where the weight has more rows: those at the end are padding, without mass and with gradient 0,
            whatever they hold. Worth giving with process_group: it tells a sharded weight from a whole one.
        fields: which statistics are wanted, None: all. Those not named come back empty and cost nothing; logprob and
            lse are always there.

    Returns:
        TokenStatistics, each wanted field in the target's shape.

    Raises:
        ValueError: an unknown field, shapes that do not match, a label outside ``[0, V)`` that is not ignore_index,
            temperature or softcap not positive, tensors on different devices, ranks of process_group whose arguments do
            not fit together, a DTensor with other placements.
        TypeError: dtypes that do not fit, or a class_weight or temperature that requires grad.
        RuntimeError: an explicit backend that cannot run; a second derivative; torch.func transforms; another rank of
            process_group raised.
    """
    check_is_given("linear_weight", linear_weight)
    call = Call(
        input, linear_weight, target, linear_bias, class_weight, ignore_index, softcap, logit_scale, temperature,
        process_group, vocab_size,
    )  # fmt: skip
    return call.statistics(planner.checked_options(options), **_wanted(fields))


def _wanted(names: Collection[str] | None) -> dict[str, bool]:
    """The optional statistics, as Call.statistics takes them."""
    if isinstance(names, str):
        raise TypeError(f"fields: expected a collection of names, got the string {names!r}")
    names = None if names is None else frozenset(names)
    for name in names or ():
        if name not in _FIELDS:
            raise ValueError(f"fields: expected names among {', '.join(_FIELDS)}, got {name!r}")
    optional = {"entropy": "entropy", "smooth": "smooth_logprob", "prediction": "prediction"}
    return {argument: names is None or name in names for argument, name in optional.items()}


def _itself(statistics: TokenStatistics) -> TokenStatistics:
    return statistics


class Call:
    """A checked call: tensors flattened to ``[T, ...]``. ``weight`` None: ``input`` holds given logits ``[..., V]``."""

    def __init__(
        self, input, weight, target, bias, class_weight, ignore_index, softcap, logit_scale, temperature,
        process_group=None, vocab_size=None,
    ):  # fmt: skip
        local = dtensor.localise(input, weight, target, bias, class_weight, process_group)
        self.input, self.weight, self.target, self.bias, self.class_weight, self.group = local
        with self.telling():
            self._check(ignore_index, softcap, logit_scale, temperature, vocab_size)

    def telling(self):
        """Checks in here: their errors reach the ranks that share the vocabulary, which would wait for this one."""
        return nullcontext() if self.group is None else distributed.telling(self.group, self.target)

    def _check(self, ignore_index, softcap, logit_scale, temperature, vocab_size) -> None:
        check_tensors(self.input, self.weight, self.target, self.bias, self.class_weight, self.group is not None)
        self.labels, self.shape = self.target, tuple(self.target.shape)
        self.rows = self.input.shape[-1] if self.weight is None else self.weight.shape[0]
        self.vocab_size = 0 if vocab_size is None else checked_vocab_size(vocab_size)
        self.input = self.input.reshape(self.target.numel(), self.input.shape[-1])
        self.target = self.target.reshape(-1).to(torch.int64)
        self.ignore_index = -100 if ignore_index is None else integer("ignore_index", ignore_index)
        self.softcap = 0.0 if softcap is None else positive("softcap", softcap)
        self.logit_scale = finite("logit_scale", logit_scale)
        self.temperature, self.inverse_temperature = None, 1.0
        if isinstance(temperature, Tensor):
            self.temperature = checked_temperature(temperature, self.target, self.labels.shape)
        elif temperature is not None:
            self.inverse_temperature = 1.0 / positive("temperature", temperature)
        self.dtype = product_dtype(self.input, self.weight)

    def statistics(
        self, options: ComputeOptions, then: Callable = _itself, /, *, entropy: bool, smooth: bool, prediction: bool
    ) -> Any:
        """Run the operator; a statistic that is not wanted comes back empty. class_weight is all of it from here on.

        What comes back is ``then`` of the statistics: a GPU is busy with it while the host waits for late checks."""
        with self.telling():
            backend = planner.choose_backend(options.backend, self.input.device, self.dtype)
            backend = planner.choose_kernels(backend, self.weight, self.dtype)
        layout = self._agree((options.skip_ignored, options.check_labels, entropy, smooth, prediction))
        class_weight = self._shard_class_weight(layout)
        labels = self._labels(options, backend, layout.vocab_size)
        free = planner.free_for_cache(options.cache_bytes, self.input.device) if self.weight is not None else 0

        def arguments(order: Tensor | None = None, count: Tensor | None = None) -> tuple:
            rows = self.target.shape[0] if order is None else order.shape[0]
            settings = Settings(
                Sizes(layout.start, layout.vocab_size, *self._plan(options, backend, layout, rows, free)),
                (self.logit_scale, self.softcap, self.inverse_temperature),
                self.dtype, backend, (entropy, smooth, prediction), layout.group,
            )  # fmt: skip
            x, y = self.input, labels.coded
            return x, self.weight, y, self.bias, class_weight, self.temperature, order, count, *settings

        outputs = self._run(labels, arguments, backend)
        result = then(self._shaped(outputs[:5]))
        labels.check()
        return result

    def _shaped(self, outputs: tuple[Tensor, ...]) -> TokenStatistics:
        flat = self.target.shape
        if self.shape == flat:
            return TokenStatistics(*outputs)
        return TokenStatistics(*(o.view(self.shape) if o.shape == flat else o for o in outputs))

    def _run(self, labels: Labels, arguments: Callable[..., tuple], backend: str) -> tuple[Tensor, ...]:
        """The operator, started before it is known which rows are kept; if not all are, run again with them."""
        every_row = arguments()
        started = self._start(every_row, backend) if labels.are_waited_for else None
        try:
            order, count = labels.kept_rows()
        except ValueError:
            started = None  # the traceback would hold on to its cache
            raise
        if order is None:
            if started is not None:
                ops.launch(started)  # before the layers of autograd, while the device may be idle
            return ops.token_statistics(*every_row, started=started)
        started = None
        return ops.token_statistics(*arguments(order, count))

    def _start(self, arguments: tuple, backend: str) -> Forward | None:
        tokens, size = self.input.shape
        head = planner.head_start(tokens, size, backend)
        if head == 0 or ops.traced(self.input):
            return None
        try:
            return ops.start(*arguments, head=head)
        except torch.OutOfMemoryError:  # the kept rows may need less
            return None

    def _agree(self, flags: tuple[bool, ...]) -> Layout:
        """Where the rows lie in the vocabulary, agreed with the ranks that share it, like what the work depends on."""
        facts = Facts(
            rows=self.rows,
            class_weights=0 if self.class_weight is None else len(self.class_weight) + 1,
            vocab_size=self.vocab_size,
        )
        if self.group is None:
            return distributed.alone(facts)
        gradient = self.weight is not None and self.input.requires_grad and torch.is_grad_enabled()
        facts = facts._replace(
            tokens=len(self.target),
            hidden=0 if self.weight is None else self.input.shape[1],
            needs_input_gradient=int(gradient),
        )
        scalars = (self.ignore_index, self.softcap, self.logit_scale, self.inverse_temperature, str(self.dtype))
        settings = (*scalars, self.temperature is None, *flags)
        return distributed.agree(self.group, facts, settings, self.target, self.temperature)

    def _shard_class_weight(self, layout: Layout) -> Tensor | None:
        """The weights of this rank's rows. Given ones are all [V], or one per row of every rank's weight."""
        c, sizes = self.class_weight, layout.class_weights
        if c is None and all(size == -1 for size in sizes):
            return None
        if c is None or not (all(size == layout.vocab_size for size in sizes) or sizes == layout.rows):
            held = " and ".join("none" if size == -1 else f"({size},)" for size in sizes)
            raise ValueError(f"class_weight: expected shape ({layout.vocab_size},), one value per class, got {held}")
        if any(size != layout.vocab_size for size in sizes):
            c = (distributed.gather_columns(c, layout) if layout.group else c)[: layout.vocab_size]
        self.class_weight = c
        return c[layout.start : layout.start + self.rows]

    def _labels(self, options: ComputeOptions, backend: str, vocab_size: int) -> Labels:
        drop, check = options.skip_ignored and self.weight is not None, options.check_labels
        return Labels(self.target, self.temperature, self.ignore_index, vocab_size, backend, drop, check)

    def _plan(
        self, options: ComputeOptions, backend: str, layout: Layout, rows: int, free: int
    ) -> tuple[int, int, int, int]:
        """Columns of a chunk of logits, of a chunk in the backward's products, of its widest ones, and of the cache."""
        columns = max(0, min(self.rows, layout.vocab_size - layout.start))
        if self.weight is None:
            return columns, columns, 0, 0
        products = Products(self.dtype, self.input.device)
        # TMA reads a weight in place from a multiple of 16 bytes.
        moved = not ops.traced(self.weight) and self.weight.data_ptr() % 16 != 0
        copies = moved or products.copies(self.weight)
        widths = planner.chunk_widths(rows, columns, backend, options.chunk_bytes, copies)
        plan = widths.logits, widths.gradient, widths.wide
        if not torch.is_grad_enabled():
            return *plan, 0
        gradients = self.weight.numel() * self.weight.element_size() + 3 * self.input.numel() * 4
        budget = planner.cache_budget(options.cache_bytes, free, gradients + rows * widths.gradient * 4)
        block = backends.get(backend).BLOCK_COLUMNS
        return *plan, planner.cache_columns(rows, columns, block, budget, products.gradient_dtype.itemsize)
