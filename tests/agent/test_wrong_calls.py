"""Wrong calls are answered in our words, which name the value and what to do next; none is met with silence."""

# mypy: disable-error-code="arg-type, call-arg, typeddict-unknown-key"
import logging
import re

import collage_agent
import httpx
import pytest
import torch
from collage_agent.audit.checkpoint_files import CheckpointError
from collage_agent.audit.split_layouts import read_checkpoint
from collage_agent.integrations.attachment import Attachment
from collage_agent.optim import CollageAdam, CollageAdamW, CollageLion, CollageSGD
from collage_agent.run_settings import read_settings, watch_defaults
from torch import nn

from collage_monitor.client import Client
from collage_monitor.errors import CollageError

PYTHONS_OWN = re.compile(
    r"__init__\(\)|got an unexpected|is not iterable|invalid literal|not supported between|could not convert|"
    r"object has no attribute"
)


FP32 = torch.float32


def weights(dtype=torch.bfloat16):
    return [nn.Parameter(torch.zeros(4, dtype=dtype))]


def watched(**options):
    model = nn.Linear(4, 4)
    return collage_agent.watch(model, torch.optim.AdamW(model.parameters()), **options)


CALLS = {
    "a misspelt option": (lambda: CollageAdamW(weights(), strateg=3), "'strateg'.*strategy"),
    "an option of others": (lambda: CollageAdamW(weights(), learning_rate=1e-3), "'learning_rate'.* lr"),
    "an option that nothing is like": (lambda: CollageAdamW(weights(), zzz=1), "'zzz'"),
    "a model for its parameters": (lambda: CollageAdamW(nn.Linear(4, 4)), r"Linear.*model\.parameters\(\)"),
    "a rate that is a text": (lambda: CollageAdamW(weights(), lr="x"), "lr='x' is not a number"),
    "a rate that is none": (lambda: CollageSGD(weights(), lr=None), "lr=None is not a number"),
    "betas of text": (lambda: CollageLion(weights(), betas=("0.9", 0.99)), r"betas\[0\]='0.9' is not a number"),
    "an eps that is a list": (lambda: CollageAdam(weights(), eps=[1e-8]), r"\[1e-08\] is not a number"),
    "a form of torch's": (lambda: CollageAdamW(weights(), fused=True), "fused=True.*leave fused out"),
    "no such strategy": (lambda: CollageAdamW(weights(), strategy="plu"), "'plu'.*split-master"),
    "a split of fp32": (lambda: CollageAdamW(weights(FP32), strategy="split-master"), "not torch.float32.*plain"),
    "SGD for AdamW": (
        lambda: CollageAdamW.from_optimizer(torch.optim.SGD(weights(), lr=0.1), strategy="plus"),
        r"use CollageSGD\.from_optimizer",
    ),
    "AdamW for SGD": (
        lambda: CollageSGD.from_optimizer(torch.optim.AdamW(weights()), strategy="light"),
        r"use CollageAdamW\.from_optimizer",
    ),
    "a misspelt option of watch": (lambda: watched(evry=3), "'evry'; did you mean 'every'"),
    "of an integration": (lambda: Attachment(None, None, None, {"sampl": 64}), "'sampl'; did you mean 'sample'"),
    "every 0": (lambda: watched(every=0), "every=0"),
    "changed round": (
        lambda: collage_agent.watch(torch.optim.AdamW(weights()), nn.Linear(4, 4)),
        "model=AdamW; pass",
    ),
    "no optimizer": (lambda: collage_agent.watch(nn.Linear(4, 4), None), "optimizer=NoneType; pass"),
    "an argument of others": (lambda: collage_agent.init(url="http://x"), "'url'; did you mean 'server_url'"),
    "an argument that nothing is like": (lambda: collage_agent.init(zzz=1), "'zzz'; there are project, name"),
    "a project that is a number": (lambda: collage_agent.init(project=3), "project=3 must be a text"),
    "an address without http": (lambda: Client("nonsense"), "'nonsense' is no address.*http://HOST:PORT"),
    "an address of another protocol": (lambda: Client("ftp://x"), "'ftp://x' is no address"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_answered_in_our_words(name):
    call, said = CALLS[name]
    with pytest.raises((TypeError, ValueError, CollageError), match=said) as caught:
        call()
    assert not PYTHONS_OWN.search(str(caught.value))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"COLLAGE_EVERY": "ten"}, "COLLAGE_EVERY ignored: 'ten' is no whole number"),
        ({"COLLAGE_SAMPLE": "some"}, "COLLAGE_SAMPLE ignored: 'some' is no whole number"),
        ({"COLLAGE_BUDGET": "1%"}, "COLLAGE_BUDGET ignored: '1%' is no number"),
        ({"COLLAGE_PROJCT": "x"}, "COLLAGE_PROJCT is not a variable of ours; did you mean 'COLLAGE_PROJECT'"),
        ({"COLLAGE_SEVER_URL": "x"}, "did you mean 'COLLAGE_SERVER_URL'"),
        ({"COLLAGE_SERVER_ARCHIVE": "the server's", "COLLAGE_DASHBOARD_URL": "the dashboard's"}, ""),
    ],
)
def test_a_wrong_variable_is_told_to_the_training(variables, said, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "collage_agent"):
        read_settings({**variables, "COLLAGE_DIR": str(tmp_path)})
        watch_defaults(variables)
    assert said in caplog.text
    assert bool(caplog.text) == bool(said), "those of server and dashboard are none of a training's"
    assert not PYTHONS_OWN.search(caplog.text)


@pytest.mark.parametrize("answer", ["<html>Hello</html>", "{}", '{"runs": 3}'])
def test_another_server_is_named_by_its_address(answer):
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=answer))
    with pytest.raises(CollageError, match=r"http://other/.*not as a Collage Monitor server does.*address"):
        Client("http://other", "t", transport=transport).runs()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "it is empty"), (b"# Read me\n", "b'# Read m'"), (b"\x89PNG\r\n", "PNG"), (b'{"a": 1}', '\'{"a"')],
)
def test_a_file_that_is_no_checkpoint_is_called_so(content, said, tmp_path):
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"file\.pt: is no checkpoint .*torch\.save") as caught:
        read_checkpoint(tmp_path / "file.pt")
    assert said in str(caught.value)
