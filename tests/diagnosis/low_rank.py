"""Optimizers that step in a low-rank space, from the published arithmetic, with states as the packages keep.

APOLLO (arXiv 2412.05270): AdamW's moments of a random projection of the gradient say by how much each channel of
the gradient is scaled. GaLore (arXiv 2403.03507): AdamW in the space of the gradient's own singular vectors. Both
keep the projection in an object that is no tensor, and step vectors as AdamW does.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Projection:
    """A matrix [rank, rows] that projects gradients, made anew every `gap` steps."""

    def __init__(self, rank: int, gap: int, *, random: bool) -> None:
        self.rank, self.gap, self.random = rank, gap, random
        self.matrix: Tensor | None = None

    def project(self, gradient: Tensor, step: int) -> Tensor:
        if self.matrix is None or step % self.gap == 0:
            self.matrix = self._made(gradient, step)
        return self.matrix @ gradient

    def back(self, small: Tensor) -> Tensor:
        assert self.matrix is not None
        return self.matrix.T @ small

    def _made(self, gradient: Tensor, step: int) -> Tensor:
        if self.random:
            seeded = torch.Generator().manual_seed(step)
            drawn = torch.randn(self.rank, len(gradient), generator=seeded, dtype=gradient.dtype)
            return drawn.div(self.rank**0.5)
        left: Tensor = torch.linalg.svd(gradient.float(), full_matrices=False)[0]
        return left[:, : self.rank].T.to(gradient.dtype)


class KeywordProjection(Projection):
    """The same from torch's calls with every argument by keyword, its signs from uniform numbers."""

    def _made(self, gradient: Tensor, step: int) -> Tensor:
        torch.manual_seed(step)
        drawn = torch.randn(size=(self.rank, len(gradient)), dtype=gradient.dtype)
        signs = torch.where(torch.rand_like(input=drawn) < 0.5, -1.0, 1.0)
        return drawn.mul(signs.to(drawn.dtype)).div(self.rank**0.5)


class LowRank(torch.optim.Optimizer):
    """AdamW whose matrices are stepped in a space of `rank`; `random` is APOLLO, else GaLore."""

    random: bool
    projection = Projection

    def __init__(
        self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0, rank=4, gap=8, scale=1.0
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, {**defaults, "rank": rank, "gap": gap, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(group, self.state[p], p)

    def _step_one(self, group, state, p) -> None:
        matrix = p.dim() == 2
        if not state:
            state["step"] = 0
            if matrix:
                state["projector"] = self.projection(group["rank"], group["gap"], random=self.random)
        gradient = state["projector"].project(p.grad, state["step"]) if matrix else p.grad
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        moved = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
        if matrix:
            moved = group["scale"] * self.widened(state["projector"], gradient, moved, p.grad)
        rate = group["lr"] * (1 - second ** state["step"]) ** 0.5 / (1 - first ** state["step"])
        p.add_(moved, alpha=-rate)
        if group["weight_decay"]:
            p.add_(p, alpha=-group["lr"] * group["weight_decay"])

    def widened(self, projection: Projection, small: Tensor, moved: Tensor, gradient: Tensor) -> Tensor:
        """The step of the whole matrix, from that in the small space."""
        raise NotImplementedError


class Apollo(LowRank):
    random = True

    def widened(self, projection, small, moved, gradient):
        return gradient * (moved.norm(dim=0) / (small.norm(dim=0) + 1e-8))


class KeywordApollo(Apollo):
    """APOLLO that names the arguments of what it draws, and draws uniform numbers like its gradient, too."""

    projection = KeywordProjection


class GaLore(LowRank):
    random = False

    def widened(self, projection, small, moved, gradient):
        return projection.back(moved)
