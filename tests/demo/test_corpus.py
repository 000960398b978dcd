"""The corpus: deterministic, split by file, and batches that only the seed decides."""

import pytest
import torch
from collage_demo.corpus import DOCUMENTATION, batch, documentation, standard_library


def test_held_out_files_are_not_trained_on(tmp_path):
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_text(f"<{index:02}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("<left out>")
    corpus = standard_library(tmp_path)
    training, validation = (text.numpy().tobytes().decode() for text in (corpus.training, corpus.validation))
    assert validation == "<15>\n<31>"
    assert training.count("<") == 38
    assert "left out" not in training
    assert "<15>" not in training


def test_the_standard_library_is_large_enough_and_reads_the_same_twice():
    first, second = standard_library(), standard_library()
    assert torch.equal(first.training, second.training)
    assert first.training.numel() > 2_000_000
    assert first.validation.numel() > 100_000
    assert first.training.dtype == torch.uint8


def test_the_documentation_is_prose_that_the_code_without_it_does_not_hold():
    text = documentation()
    prose, held_out = (part.numpy().tobytes() for part in (text.training, text.validation))
    assert len(prose) > 200_000
    assert len(held_out) > 20_000
    assert prose != held_out
    code, rest = standard_library(), standard_library(without=(DOCUMENTATION,))
    everything, library = (c.training.numpy().tobytes() + c.validation.numpy().tobytes() for c in (code, rest))
    assert len(everything) - len(library) > len(prose)
    passage = b'The "assert" statement'
    assert passage in prose + held_out
    assert passage not in library


def test_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 Python sources"):
        standard_library(tmp_path)


def test_targets_are_the_inputs_one_byte_on():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = batch(text, 4, 9, seed=3)
    assert inputs.shape == targets.shape == (4, 9)
    assert torch.equal(inputs + 1, targets)
    again, _ = batch(text, 4, 9, seed=3)
    other, _ = batch(text, 4, 9, seed=4)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)


def test_the_last_passage_ends_with_the_text():
    inputs, targets = batch(torch.arange(10, dtype=torch.uint8), 200, 8, seed=0)
    assert targets.max() == 9
    assert inputs.min() == 0
