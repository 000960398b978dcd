"""A merge is foretold as PEFT carries it out, bit for bit, for each form of a LoRA adapter."""

import json

import pytest
import torch
from click.testing import CliRunner
from collage_agent.audit import CheckpointError
from collage_agent.audit.adapter_merge import audit_merge
from torch import nn

from collage_monitor.command import root

peft = pytest.importorskip("peft")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def model_of(dtype, fan_in_fan_out=False):
    """GPT-2's weights stand the other way round."""
    torch.manual_seed(0)
    sizes = ((32, 16), (16, 24), (24, 8))
    layers = [Conv1D(out, size) if fan_in_fan_out else nn.Linear(size, out) for size, out in sizes]
    return nn.Sequential(*layers).to(dtype)


def adapted(model, size, **options):
    """The model with an adapter that adds about `size` of a weight's norm."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], **options)
    made = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, own in made.named_parameters():
            if "lora_B" in name:
                own.copy_(size * torch.randn(own.shape, generator=generator))
    return made


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"fan_in_fan_out": True}, {"alpha_pattern": {"2|3": 32}, "rank_pattern": {"0": 2}}],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_merge_is_foretold_as_peft_carries_it_out(tmp_path, dtype, options):
    model = model_of(dtype, options.get("fan_in_fan_out", False))
    torch.save(model.state_dict(), tmp_path / "base.pt")
    before = {name: own.detach().double() for name, own in model.state_dict().items()}
    made = adapted(model, 1e-3, **options)
    made.save_pretrained(tmp_path / "adapter")
    told = {layer.name: layer for layer in audit_merge(tmp_path / "base.pt", tmp_path / "adapter").layers}
    asked = {
        f"{name}.weight": made.base_model.model.get_submodule(name).get_delta_weight("default").double()
        for name in ("0", "2")
    }
    after = made.merge_and_unload().state_dict()
    assert told.keys() == asked.keys()
    for name, delta in asked.items():
        arrived = after[name].double() - before[name]
        assert told[name].arrived_ratio == pytest.approx(
            float((delta * arrived).sum() / delta.square().sum()), rel=1e-6
        )
        assert told[name].lost_ratio == pytest.approx(float((arrived == 0)[delta != 0].double().mean()), abs=1e-9)
        assert told[name].dtype == str(dtype).removeprefix("torch.")
    assert (dtype is torch.float32) == all((layer.arrived_ratio or 0.0) > 0.9999 for layer in told.values())


def audited(folder, *words, status=0):
    given = [folder / "base.pt", "--adapter", folder / "adapter", *words]
    done = CliRunner().invoke(root, ["audit", *map(str, given)])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def merge_of(tmp_path):
    """Saves a bf16 model and an adapter of a size beside it, and returns the folder."""

    def save(size):
        model = model_of(torch.bfloat16)
        torch.save({"model": model.state_dict()}, tmp_path / "base.pt")
        adapted(model, size).save_pretrained(tmp_path / "adapter")
        return tmp_path

    return save


def test_the_command_says_what_arrives_and_what_to_do(merge_of):
    folder = merge_of(1e-4)
    text = audited(folder, "--strict", status=1)
    assert "merged in bfloat16, " in text
    assert "keep the adapter beside the weights" in text
    told = json.loads(audited(folder, "--json"))
    assert told["total"]["elements"] == 32 * 16 + 24 * 8
    assert told["total"]["lost_ratio"] > 0.5
    first, second = (layer["arrived_ratio"] for layer in told["layers"])
    assert first <= told["total"]["arrived_ratio"] <= second


def test_an_adapter_that_adds_nothing_loses_nothing(merge_of):
    assert "the adapter adds nothing" in audited(merge_of(0.0), "--strict")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"peft_type": "IA3"}, "kind IA3; only LORA's merge is known"),
        ({"use_dora": True}, "kind DORA"),
        (None, "has no readable adapter_config.json"),
    ],
)
def test_what_is_no_lora_adapter_is_refused_by_name(merge_of, changed, words):
    folder = merge_of(1e-3)
    file = folder / "adapter" / "adapter_config.json"
    file.write_text("{" if changed is None else json.dumps({**json.loads(file.read_text()), **changed}))
    with pytest.raises(CheckpointError, match=words):
        audit_merge(folder / "base.pt", folder / "adapter")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"1.weight": torch.ones(16, 24)}, r"[02]\.weight of the base is not there; pass the model that"),
        (dict.fromkeys(["0.weight", "2.weight"], torch.ones(3, 3)), r"is \(3, 3\), and the adapter adds"),
    ],
)
def test_an_adapter_of_another_model_names_what_lacks(merge_of, base, words):
    folder = merge_of(1e-3)
    torch.save(base, folder / "base.pt")
    with pytest.raises(CheckpointError, match=words):
        audit_merge(folder / "base.pt", folder / "adapter")


def test_what_a_merge_of_linear_weights_does_not_speak_for_is_named(tmp_path):
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4)).bfloat16()
    torch.save(model.state_dict(), tmp_path / "base.pt")
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "1"]))
    with torch.no_grad():
        made.base_model.model[1].lora_B["default"].weight[:2] = 1e-4
    made.save_pretrained(tmp_path / "adapter")
    merge = audit_merge(tmp_path / "base.pt", tmp_path / "adapter")
    assert [layer.name for layer in merge.layers] == ["1.weight"]
    assert any("lora_embedding_A" in name for name in merge.left_out)
    assert "left out: base_model.model.0.lora_embedding_A" in audited(tmp_path)
    assert merge.total.lost_ratio == merge.layers[0].lost_ratio, "a share of what the adapter adds to"
