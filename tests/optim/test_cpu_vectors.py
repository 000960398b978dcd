"""Four elements to a word: what is packed is unpacked bit for bit, wherever a vector begins."""

import pytest
import torch
from collage_optim.cpu_vectors import ELEMENTS, begins_at_a_word, packed, unpacked, words

COUNT = 4096


def any_bits(dtype):
    """Every kind of number of the format: NaN, infinity and subnormals too."""
    bits = torch.int8 if dtype == torch.int8 else torch.int16
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max + 1, (COUNT,), dtype=bits).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int16, torch.int8], ids=str)
def test_each_element_of_a_word_is_found_and_packed_again(dtype):
    vector = any_bits(dtype)
    word = words({"vector": vector})["vector"]
    assert word.shape == (COUNT // ELEMENTS,)
    found = [unpacked(word, place, dtype) for place in range(ELEMENTS)]
    for place, elements in enumerate(found):
        own = vector[place::ELEMENTS]
        if dtype == torch.bfloat16:
            # The upper half of an fp32; a comparison of floats would pass over NaN.
            assert torch.equal(elements.view(torch.int32), own.view(torch.int16).to(torch.int32) << 16)
        else:
            assert torch.equal(elements, own.to(torch.int32))
    assert torch.equal(packed(found, dtype), word)


def test_other_formats_stay_rows_of_four():
    vector = torch.arange(COUNT, dtype=torch.float32)
    rows = words({"vector": vector})["vector"]
    assert rows.data_ptr() == vector.data_ptr()
    assert torch.equal(unpacked(rows, 3, torch.float32), vector[3::ELEMENTS])


@pytest.mark.parametrize(("dtype", "first", "whole"), [(torch.int16, 1, False), (torch.int16, 4, True)])
def test_what_lies_between_words_is_copied(dtype, first, whole):
    vector = any_bits(dtype)[first : first + 8]
    assert begins_at_a_word(vector) is whole
    word = words({"vector": vector})["vector"]
    assert (word.data_ptr() == vector.data_ptr()) is whole
    assert torch.equal(word.view(dtype), vector)
