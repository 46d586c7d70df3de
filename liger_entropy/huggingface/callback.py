"""EntropyCallback: the entropy of the tokens trained on, in the Trainer's own log."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_callback import TrainerCallback

from .call import Tally
from .patch import PatchedModel


class EntropyCallback(TrainerCallback):
    """Adds ``entropy`` to every training record of a ``transformers.Trainer``, beside ``loss``.

    It is the mean entropy, in nats, over all kept tokens since the record before: a token counts the same whichever
    micro-batch, step or process it was in. It comes from the forwards that made the losses; there is no second pass and
    no transfer from the device before the record is written. Evaluation is left out.

    ``callbacks=[EntropyCallback()]`` reaches ``state.log_history`` and the console. The Trainer puts its reporters
    (``report_to``: TensorBoard, W&B) before the callbacks it is given; :meth:`attach` reaches them too.

    Raises:
        ValueError: at the start of training, the model is not patched: call :func:`apply_liger_entropy` before.
    """

    def __init__(self) -> None:
        self._tally: Tally | None = None
        self._first = False

    def attach(self, trainer: Any) -> EntropyCallback:
        """Put this callback before the reporters of ``trainer``, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        self._first = True
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        patched = _patched(model)
        if not patched:
            raise ValueError(
                f"EntropyCallback: {type(model).__name__} is not patched, so there is no entropy to log: call "
                "apply_liger_entropy(model) before training"
            )
        if args.report_to and not self._first:
            warnings.warn(
                f"EntropyCallback: {', '.join(args.report_to)} will not get the entropy, because the Trainer calls "
                "reporters before the callbacks it is given: use EntropyCallback().attach(trainer)",
                stacklevel=2,
            )
        self._tally = Tally.on(args.device)
        for module in patched:
            module._liger_entropy.tally = self._tally

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for module in _patched(model):
            module._liger_entropy.tally = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._tally is None or not logs or "loss" not in logs:  # the record of an evaluation, or of the whole run
            return
        entropy, tokens = _over_processes(self._tally.take(), args.device)
        if tokens:
            logs["entropy"] = state.log_history[-1]["entropy"] = entropy / tokens
        else:
            warnings.warn(
                "EntropyCallback: no entropy to log, because no loss came from the patched model with a label to keep "
                "(the Trainer's label_smoothing_factor and compute_loss_func take the labels away from the model)",
                stacklevel=2,
            )


def _patched(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PatchedModel)]


def _over_processes(sums: tuple[float, int], device: torch.device) -> tuple[float, int]:
    """Summed over all of them; ranks that share their tokens (tensor parallel) double both sums."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sums
    total = torch.tensor(sums, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total[0].item(), int(total[1].item())
