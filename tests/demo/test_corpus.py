"""The corpus: deterministic, split by file, and batches that only the seed decides."""

import pytest
import torch
from collage_demo.corpus import DOCUMENTATION, batch, documentation, standard_library


def bytes_of(corpus):
    """The bytes to train on, and those that are held out."""
    return [part.numpy().tobytes() for part in (corpus.training, corpus.validation)]


def test_held_out_files_are_not_trained_on_and_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds 0 Python sources"):
        standard_library(tmp_path)
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_text(f"<{index:02}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("<left out>")
    training, validation = bytes_of(standard_library(tmp_path))
    assert validation == b"<15>\n<31>"
    assert training.count(b"<") == 38
    assert b"left out" not in training
    assert b"<15>" not in training


def test_the_standard_library_is_large_enough_and_reads_the_same_twice_and_the_documentation_is_prose():
    code = standard_library()
    training, validation = bytes_of(code)
    assert bytes_of(standard_library())[0] == training
    assert len(training) > 2_000_000
    assert len(validation) > 100_000
    assert code.training.dtype == torch.uint8
    prose, held_out = bytes_of(documentation())
    assert len(prose) > 200_000
    assert len(held_out) > 20_000
    assert prose != held_out
    library = b"".join(bytes_of(standard_library(without=(DOCUMENTATION,))))
    assert len(training) + len(validation) - len(library) > len(prose)
    passage = b'The "assert" statement'
    assert passage in prose + held_out
    assert passage not in library


def test_targets_are_the_inputs_one_byte_on_and_the_last_passage_ends_with_the_text():
    text = torch.arange(100, dtype=torch.uint8)
    inputs, targets = batch(text, 4, 9, seed=3)
    assert inputs.shape == targets.shape == (4, 9)
    assert torch.equal(inputs + 1, targets)
    again, other = (batch(text, 4, 9, seed=seed)[0] for seed in (3, 4))
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    inputs, targets = batch(torch.arange(10, dtype=torch.uint8), 200, 8, seed=0)
    assert (inputs.min(), targets.max()) == (0, 9)
