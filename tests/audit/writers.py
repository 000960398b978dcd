"""Makes the checkpoints of `written/` with DeepSpeed's and Megatron-Core's own writers, on a CPU.

python -m tests.audit.writers deepspeed 1 DIR     stage 0, 1 or 3; twice, with RANK=0 and RANK=1
python -m tests.audit.writers megatron 0 DIR      one process

Run it where deepspeed 0.19.8 or megatron-core 0.16.1 is installed, then `tar cJf written/NAME.tar.xz -C DIR .`; the
tests read the archives and need neither. ROUNDED=1 casts the master weights to bfloat16 and back before the save.
"""

# mypy: ignore-errors
import os
import sys
from pathlib import Path

import torch
from torch import nn

ROUNDED = os.environ.get("ROUNDED") == "1"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 17), nn.LayerNorm(17), nn.Linear(17, 12))


def loss_of(model, step):
    torch.manual_seed(step)
    return (model(torch.randn(16, 12).to(next(model.parameters()).dtype)).float() - 1).square().mean()


@torch.no_grad()
def cast_and_back(masters):
    for master in masters if ROUNDED else ():
        master.copy_(master.bfloat16().float())


def deepspeed(stage, folder):
    import deepspeed as library

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # A build in C++, of minutes.
    model = network()
    matrices = [own for own in model.parameters() if own.dim() > 1]
    vectors = [own for own in model.parameters() if own.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    made = library.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-4), config=settings)
    engine, optimizer = made[0], made[1]
    for step in range(20):
        engine.backward(loss_of(engine, step))
        engine.step()
    kept = {0: "fp32_groups", 1: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}[stage]
    masters = getattr(optimizer, kept)
    cast_and_back([own for group in masters for own in group] if stage == 0 else masters)
    engine.save_checkpoint(folder)


def megatron(_, folder):
    torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing import optimizer as sharded

    torch.distributed.init_process_group("gloo")
    model = network().bfloat16()
    masters = [own.detach().float().requires_grad_() for own in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for step in range(20):
        model.zero_grad()
        loss_of(model, step).backward()
        for own, master in zip(model.parameters(), masters, strict=True):
            master.grad = own.grad.float()
        optimizer.step()
        for own, master in zip(model.parameters(), masters, strict=True):
            own.data.copy_(master)
    cast_and_back(masters)
    names = {f"decoder.{name}": own for name, own in model.named_parameters()}
    weights = {name: ShardedTensor.from_rank_offsets(name, own) for name, own in names.items()}
    places = sharded.get_param_id_to_sharded_param_map(weights, model.parameters())
    prefix = "optimizer.state.fp32_param"
    kept = {i: sharded.make_sharded_optimizer_tensor(places[i], own, prefix) for i, own in enumerate(masters)}
    states = optimizer.state_dict()
    sharded.optim_state_to_sharding_state(states, places, exclude_keys="step")
    states["param_groups"][0]["step"] = 20
    newest = Path(folder, "iter_0000020")
    newest.mkdir(parents=True)
    content = {"model": weights, "optimizer": {"optimizer": states, "fp32_from_fp16_params": kept}}
    dist_checkpointing.save(content, str(newest))
    Path(folder, "latest_checkpointed_iteration.txt").write_text("20")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"deepspeed": deepspeed, "megatron": megatron}[sys.argv[1]](int(sys.argv[2]), sys.argv[3])
