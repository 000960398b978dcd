"""AdamW in fp64 from the textbook, with its bias-corrected averages spelt out."""

import torch


class ReferenceAdamW:
    """Keeps its own fp64 weight and averages; fed the same gradients as the optimizer under test."""

    def __init__(
        self,
        parameter: torch.Tensor,
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.parameter = parameter.detach().double().clone()
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.maximize = amsgrad, maximize
        self.first = self.second = self.largest = torch.zeros_like(self.parameter)
        self.steps = 0

    def step(self, gradient: torch.Tensor) -> torch.Tensor:
        """Advance by one step and return the displacement."""
        self.steps += 1
        gradient = -gradient.double() if self.maximize else gradient.double()
        self.first = self.betas[0] * self.first + (1 - self.betas[0]) * gradient
        self.second = self.betas[1] * self.second + (1 - self.betas[1]) * gradient**2
        self.largest = torch.maximum(self.largest, self.second)
        corrected_first = self.first / (1 - self.betas[0] ** self.steps)
        corrected_second = (self.largest if self.amsgrad else self.second) / (1 - self.betas[1] ** self.steps)
        direction = corrected_first / (corrected_second.sqrt() + self.eps) + self.weight_decay * self.parameter
        displacement = -self.lr * direction
        self.parameter = self.parameter + displacement
        return displacement
