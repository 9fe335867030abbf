"""Where a module lies: on the device that computes, or in host memory while the engine needs the room."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_HOST = torch.device("cpu")


class Residence:
    """A module with its optimizer state. Asking for `module` brings both home; `leave` sends them to host memory."""

    def __init__(self, module: nn.Module, home: torch.device, optimizer: torch.optim.Optimizer | None = None) -> None:
        """`home`: where `module` lies now, and rests between passes."""
        self._module = module
        self._home = self._place = home
        self._optimizer = optimizer

    @property
    def module(self) -> nn.Module:
        self._move(self._home)
        return self._module

    def leave(self) -> None:
        self._move(_HOST)

    def _move(self, device: torch.device) -> None:
        if device == self._place:
            return
        self._module.to(device)
        for state in self._optimizer.state.values() if self._optimizer else ():
            state.update({n: v.to(device) for n, v in state.items() if isinstance(v, Tensor) and n != "step"})
        self._place = device
        if self._home.type == "cuda":
            torch.cuda.empty_cache()
