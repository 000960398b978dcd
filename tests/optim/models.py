"""Small sets of parameters with gradients, the same for every optimizer under test."""

import torch

SHAPES = ((24, 16), (7,), (3, 5, 2), (40,))


def parameters(dtype=torch.bfloat16, shapes=SHAPES, seed=1, scale=0.02):
    """Fresh parameters, equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter((torch.randn(shape, generator=generator) * scale).to(dtype)) for shape in shapes]


def copies_of(members, dtype=None):
    """Parameters of the same numbers, in memory of their own."""
    return [torch.nn.Parameter(member.detach().clone().to(dtype or member.dtype)) for member in members]


def give_gradients(*sets, step, scale=1e-2):
    """Give all parameter sets the gradients of one step, drawn from the step's number."""
    generator = torch.Generator().manual_seed(1000 + step)
    for members in zip(*sets, strict=True):
        gradient = torch.randn(members[0].shape, generator=generator) * scale
        for member in members:
            member.grad = gradient.to(member.device, getattr(member, "grad_dtype", None) or member.dtype)


def train(optimizer, members, steps, first=1):
    """Step through the gradients of steps first, first + 1, …"""
    for step in range(first, first + steps):
        give_gradients(members, step=step)
        optimizer.step()


def train_each(optimizers, steps, first=1):
    """Step each through the same gradients."""
    for optimizer in optimizers:
        train(optimizer, [member for group in optimizer.param_groups for member in group["params"]], steps, first)


def walk(optimizer, *gradients):
    """Steps of one parameter by these gradients, a number being that of each element; what is stored at the end."""
    (member,) = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        member.grad = torch.as_tensor(gradient, dtype=member.dtype).expand_as(member).clone()
        optimizer.step()
    return optimizer.stored_parameter(member)


def tensors_of(optimizer):
    """Every tensor that an optimizer holds, by position and key."""
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            found[number, index, "parameter"] = parameter.detach()
            found.update({(number, index, key): value for key, value in optimizer.state[parameter].items()})
    return found


def assert_same_bits(first, second):
    """Two optimizers hold the same tensors: keys, dtypes and bits."""
    ours, theirs = tensors_of(first), tensors_of(second)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype, key
        assert torch.equal(tensor, theirs[key]), key


def trained(model, optimizer, steps, seed=0):
    """The losses of a model in bf16 that learns to mirror its inputs."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 16, generator=generator).bfloat16()
        loss = (model(inputs).float() - inputs.float().flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
