"""Frameworks under DDP, as their users start them; each job returns what one rank saw."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from collage_agent.integrations.transformers import CollageCallback
from collage_agent.transport import MemoryTransport
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from collage_monitor.wire import StreamCreate
from tests.integrations.identity import recorded
from tests.integrations.reported import scalars_of, steps_of

BATCHES, ACCUMULATED, ROWS = 24, 2, 4


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 80), nn.GELU(), nn.Dropout(0.2), nn.Linear(80, 3)).to(torch.bfloat16)


def inputs(count):
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def accelerate(folder):
    """An Accelerate loop with accumulation, without the agent and with it."""
    return {watched: _accelerated(watched) for watched in (False, True)}


def _accelerated(watched):
    from accelerate import Accelerator
    from collage_agent.integrations.accelerate import CollageTracker, watch_accelerated

    transport = MemoryTransport()
    tracker = CollageTracker("doors", run_options={"transport": transport}) if watched else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, log_with=tracker)
    own = network()
    data = DataLoader(TensorDataset(inputs(2 * ROWS * BATCHES)), batch_size=ROWS)
    model, optimizer, data = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=1e-3), data)
    torch.manual_seed(40 + accelerator.process_index)
    if watched:
        accelerator.init_trackers("doors")
        watch_accelerated(accelerator, model, optimizer, every=2, sample="all", oracle=True)
    losses = []
    for (batch,) in data:
        with accelerator.accumulate(model):
            loss = (model(batch).float() - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if watched:
            accelerator.log({"loss": losses[-1]})
    if watched:
        # It ends the process group, too.
        accelerator.end_training()
    return {"training": recorded(own, optimizer.optimizer, losses), **_told(transport)}


def transformers(folder):
    """A Hugging Face Trainer, without the agent and with it."""
    # It warns about its own use of other libraries.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {watched: _trained(Path(folder), watched) for watched in (False, True)}


def _trained(folder, watched):
    set_seed(11)
    transport = MemoryTransport()
    size = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    model = GPT2LMHeadModel(GPT2Config(**size, eos_token_id=0, bos_token_id=0, loss_type="ForCausalLM"))
    rows = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(3))
    options = TrainingArguments(
        output_dir=str(folder / str(os.getpid())),
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    callback = CollageCallback("doors", run_options={"transport": transport}, every=2, sample=512)
    trainer = Trainer(
        model.to(torch.bfloat16),
        options,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[callback] if watched else [],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    optimizer = trainer.optimizer
    return {"training": recorded(model, getattr(optimizer, "optimizer", optimizer), losses), **_told(transport)}


def _told(transport):
    streams = [message for message in transport.messages if isinstance(message, StreamCreate)]
    return {
        "steps": steps_of(transport),
        "scalars": scalars_of(transport),
        "rank": int(os.environ["RANK"]),
        "stream": streams[-1] if streams else None,
        "run": transport.envelopes[0].run_id if streams else None,
        "totals": [report.statistics for report in transport.reports if report.statistics is not None],
    }
