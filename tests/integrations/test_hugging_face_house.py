"""How Axolotl, LLaMA-Factory and Automodel call what we give them: replicas of the versions in drills/doors."""

import importlib
import runpy
import sys
import types
from typing import Any

import collage_agent as collage
import pytest
import torch
from collage_agent.transport import MemoryTransport

from tests.agent.training import mlp, mlp_loss
from tests.integrations.test_transformers import trainer_for
from tests.integrations.trainings import begun, scalars_of

pytestmark = pytest.mark.slow


class BasePlugin:
    """axolotl/integrations/base.py: every method is called on every plugin; these are all that ours may meet."""

    def register(self, cfg):
        """With the configuration as it was written."""

    def add_callbacks_pre_trainer(self, cfg, model):
        return []

    def add_callbacks_post_trainer(self, cfg, trainer):
        return []

    def post_trainer_create(self, cfg, trainer):
        """The trainer has been made."""


@pytest.fixture
def modules(monkeypatch):
    """Makes modules that cannot be installed here: {dotted name: attributes}."""

    def make(contents):
        packages = {name.rsplit(".", depth)[0] for name in contents for depth in range(name.count(".") + 1)}
        for package in packages:
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        for name, attributes in contents.items():
            vars(sys.modules[name]).update(attributes)

    yield make
    for name in ("axolotl", "llamafactory"):
        sys.modules.pop(f"collage_agent.integrations.{name}", None)


def load_plugin(plugin_name):
    """axolotl/integrations/base.py, load_plugin."""
    module_name, class_name = plugin_name.rsplit(".", 1)
    return getattr(importlib.import_module(module_name), class_name)()


def test_an_axolotl_plugin_named_in_yaml_watches_its_trainer(modules, tmp_path):
    modules({"axolotl.integrations.base": {"BasePlugin": BasePlugin}})
    transport = MemoryTransport()
    collage.init("of-the-training", transport=transport)
    plugin = load_plugin("collage_agent.integrations.axolotl.CollagePlugin")
    config = {"plugins": ["…"], "collage": {"every": 2, "sample": 512}}
    plugin.register(config)
    trainer = trainer_for(tmp_path, plugin.add_callbacks_pre_trainer(config, None), max_steps=6)
    plugin.post_trainer_create(config, trainer)
    for callback in plugin.add_callbacks_post_trainer(config, trainer):
        trainer.add_callback(callback)
    trainer.train()
    assert collage.current_run() is not None
    collage.finish()
    assert "loss" in scalars_of(transport)
    assert [report.step for report in transport.reports if report.statistics is not None] == [1, 2, 4, 6]


def test_an_axolotl_plugin_refuses_bad_options_at_once(modules):
    modules({"axolotl.integrations.base": {"BasePlugin": BasePlugin}})
    with pytest.raises(ValueError, match="every=0"):
        load_plugin("collage_agent.integrations.axolotl.CollagePlugin").register({"collage": {"every": 0}})


def test_our_command_trains_as_llamafactorys_does(modules, tmp_path, monkeypatch):
    transport = MemoryTransport()

    def run_exp(args=None, callbacks=None):
        """llamafactory/train/tuner.py: arguments of the process, and callbacks that it adds its own to."""
        assert args is None
        assert sys.argv[1:] == ["train.yaml"]
        callbacks = callbacks or []
        trainer_for(tmp_path, callbacks, max_steps=4).train()

    modules({"llamafactory.train.tuner": {"run_exp": run_exp}})
    monkeypatch.setattr(sys, "argv", ["llamafactory.py", "train.yaml"])
    collage.init("of-the-training", transport=transport)
    runpy.run_module("collage_agent.integrations.llamafactory", run_name="__main__")
    collage.finish()
    assert begun(transport)
    assert "loss" in scalars_of(transport)


def test_automodel_builds_our_optimizer_by_its_dotted_name():
    """nemo_automodel/components/optim/optimizer.py: OptimizerFromFactoryConfig.build, of a resolved `_target_`."""
    written: dict[str, Any] = {
        "_target_": "collage_agent.optim.CollageAdamW",
        "lr": 1e-5,
        "strategy": "split-master",
    }
    module, name = written.pop("_target_").rsplit(".", 1)
    factory = getattr(importlib.import_module(module), name)
    model = mlp(dtype=torch.bfloat16)
    optimizer = factory(params=[entry for entry in model.parameters() if entry.requires_grad], **written)
    handle = collage.watch(model, optimizer, every=1)
    for step in range(6):
        optimizer.zero_grad()
        mlp_loss(model, step).backward()
        optimizer.step()
    assert handle.info.observed_strategy == "split-master"
    assert handle.judgement().health == "healthy"


@pytest.mark.parametrize("name", ["axolotl", "llamafactory", "torchtitan"])
def test_a_door_of_an_absent_package_says_what_to_install(name):
    with pytest.raises(ImportError, match=f"needs {name} .*pip install {name}"):
        importlib.import_module(f"collage_agent.integrations.{name}")
