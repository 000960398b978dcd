"""A CUDA graph's replica on the host, and Megatron's wrappers around it, after megatron-core 0.19.2.

What is captured are the calls of torch's kernels and the memory that they write. A replay makes the same calls on
the same memory: no `step`, no hook, and, as on a device, no tensor's count of writes goes up.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["HostGraph", "MegatronOptimizer", "OptimizerCudaGraphWrapper"]


class _Recorder(TorchDispatchMode):
    """Notes each call of a kernel, and the memory that it reads and writes."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function not in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            self.calls.append((function, *tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))))
        return result


class HostGraph:
    """torch.cuda.CUDAGraph as far as a step needs it: nothing is computed while it is captured."""

    def __init__(self):
        self._calls = []

    def capture(self, step, memory):
        """memory: all tensors that the step writes; their numbers are as before when this returns."""
        before = [tensor.detach().clone() for tensor in memory]
        with _Recorder() as recorder:
            result = step()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(memory)):
            for tensor, old in zip(memory, before, strict=True):
                tensor.copy_(old)
        self._calls = recorder.calls
        return result

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs in self._calls:
                tensors: list[torch.Tensor] = []
                tree_map_only(torch.Tensor, tensors.append, (args, kwargs))
                with torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
                    function(*args, **kwargs)


class OptimizerCudaGraphWrapper:
    """megatron/core/optimizer/optimizer_cuda_graph.py: some steps, a capture, and then only replays."""

    def __init__(self, optimizer_step_func, memory, cuda_graph_warmup_steps=1):
        self.optimizer_step_func = optimizer_step_func
        self.cuda_graph_warmup_steps = cuda_graph_warmup_steps
        self.memory = memory
        self.curr_iteration = 0
        self.cuda_graph = None
        self.result = None

    def __call__(self):
        if self.curr_iteration == self.cuda_graph_warmup_steps:
            self.cuda_graph = HostGraph()
            self.result = self.cuda_graph.capture(self.optimizer_step_func, self.memory())
        if self.cuda_graph is None:
            self.result = self.optimizer_step_func()
        else:
            self.cuda_graph.replay()
        self.curr_iteration += 1
        return self.result


class MegatronOptimizer:
    """How Megatron's DistributedOptimizer steps: fp32 shards of the 16-bit weights, in an inner torch optimizer.

    The second of two `ranks` holds the second part of each weight. Without `masters`, as of a precision-aware
    optimizer, the shards are flat pieces of the weights' own memory, as those of fp32 weights always are. Gradients
    are cast and clipped within the step, so that a graph does it, too.
    """

    def __init__(self, model, make, *, masters=True, ranks=1, rank=0):
        self.model = model
        self.clip = 0.5
        self.shards = []
        for weight in model.parameters():
            size = -(-weight.numel() // ranks)
            piece = weight.detach().view(-1)[rank * size : (rank + 1) * size]
            main = piece.clone().float() if masters and weight.dtype != torch.float32 else piece
            if main is not piece:
                weight.main_param = main
                weight.main_param_sharded = True
            self.shards.append((weight, piece, main, slice(rank * size, rank * size + piece.numel())))
        self.optimizer = make([main for *_, main, _ in self.shards])

    def step(self):
        for weight, _, main, place in self.shards:
            gradient = weight.main_grad.view(-1)[place]
            main.grad = gradient.to(main.dtype) if main.grad is None else main.grad.copy_(gradient)
        for *_, main, _ in self.shards:
            main.grad.mul_(self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for _, piece, main, _ in self.shards:
                if main is not piece:
                    piece.copy_(main)
        return True, None, None

    def zero_grad(self):
        """Gradients are added up in buffers of their own (`main_grad`), which stay where they are."""
        for weight in self.model.parameters():
            if not hasattr(weight, "main_grad"):
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
            weight.main_grad.zero_()

    def backward(self, loss):
        loss.backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.main_grad += weight.grad
                weight.grad = None

    def memory(self):
        """All that a step writes."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        gradients = [main.grad for *_, main, _ in self.shards if main.grad is not None]
        pieces = {tensor.data_ptr(): tensor for _, piece, main, _ in self.shards for tensor in (piece, main)}
        return [*pieces.values(), *states, *gradients]
