"""Headers of checkpoint files: good ones give places, damaged ones an error that names file and tensor."""

import json
from pathlib import Path

import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.box import DType
from hybridrl.layout.checkpoint import read_checkpoint_index

GOOD = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]}


def write_file(folder: Path, header: object, num_bytes: int = 16) -> Path:
    encoded = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(num_bytes))
    return path


def test_a_tensor_is_found_after_the_header(tmp_path: Path) -> None:
    path = write_file(tmp_path, {"__metadata__": {"format": "pt"}, "w": GOOD})
    index = read_checkpoint_index(tmp_path)
    assert list(index) == ["w"]
    assert (index["w"].tensor.shape, index["w"].tensor.dtype) == ((2, 3), DType.BFLOAT16)
    assert index["w"].offset_bytes == path.stat().st_size - 16 + 4


def test_a_scalar_and_an_empty_tensor_have_their_bytes(tmp_path: Path) -> None:
    scalar = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [4, 4]}
    write_file(tmp_path, {"scalar": scalar, "empty": empty})
    assert [entry.tensor.shape for entry in read_checkpoint_index(tmp_path).values()] == [(), (0, 7)]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([1], "damaged safetensors header (got list, expected an object); copy the file again"),
        ({"w": 3}, "tensor w is 3 in the header, expected an object with dtype, shape and data_offsets; copy the file"),
        (
            {"w": {"dtype": "BF16", "shape": [2, 3]}},
            "tensor w is {'dtype': 'BF16', 'shape': [2, 3]} in the header, exp",
        ),
        ({"w": GOOD | {"shape": [2, "3"]}}, "in the header, expected an object with dtype, shape and data_offsets"),
        ({"w": GOOD | {"data_offsets": [4]}}, "in the header, expected an object with dtype, shape and data_offsets"),
        ({"w": GOOD | {"dtype": "F8_E4M3"}}, "tensor w has dtype F8_E4M3, expected one of F32, BF16"),
        (
            {"w": GOOD | {"shape": [2, 4]}},
            "tensor w has 12 bytes at data_offsets 4..16, expected 16 for shape (2, 4) of BF16; copy the file again",
        ),
        ({"w": GOOD | {"data_offsets": [-4, 8]}}, "tensor w has 12 bytes at data_offsets -4..8, expected 12 for shape"),
        ({"w": GOOD | {"data_offsets": [8, 20]}}, "truncated, tensor w ends at byte "),
    ],
)
def test_a_damaged_header_names_the_file_and_the_tensor(tmp_path: Path, header: object, message: str) -> None:
    path = write_file(tmp_path, header)
    with pytest.raises(LayoutError) as caught:
        read_checkpoint_index(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff" * 32)
    with pytest.raises(LayoutError, match=r"model.safetensors: damaged safetensors header \(length "):
        read_checkpoint_index(tmp_path)
    path.write_bytes((4).to_bytes(8, "little") + b"{{{{")
    with pytest.raises(LayoutError, match=r"model.safetensors: damaged safetensors header \(Expecting"):
        read_checkpoint_index(tmp_path)
