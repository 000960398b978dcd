"""SGD and Lion in fp64 from their papers, each as one function of the whole history."""

import torch


def sgd_weights(start, gradients, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
    """The weights after each gradient."""
    weight, buffer, path = start.double(), None, []
    for gradient in gradients:
        direction = gradient.double() + weight_decay * weight
        if momentum:
            buffer = direction if buffer is None else momentum * buffer + (1 - dampening) * direction
            direction = direction + momentum * buffer if nesterov else buffer
        weight = weight - lr * direction
        path.append(weight)
    return path


def lion_weights(start, gradients, lr, betas, weight_decay=0.0):
    """The weights after each gradient: sign of the interpolation first, then the average."""
    weight, average, path = start.double(), torch.zeros_like(start, dtype=torch.float64), []
    for gradient in gradients:
        direction = torch.sign(betas[0] * average + (1 - betas[0]) * gradient.double())
        weight = weight - lr * (direction + weight_decay * weight)
        average = betas[1] * average + (1 - betas[1]) * gradient.double()
        path.append(weight)
    return path
