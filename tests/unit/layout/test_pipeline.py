"""Which layers each pipeline rank has."""

import pytest

from hybridrl.errors import LayoutError
from hybridrl.layout.megatron.pipeline import PipelineLayout, parse_stages


def layers(pipeline, pp_size, num_layers, num_mtp=0):
    return [
        [list(chunk.layers) for chunk in pipeline.chunks(rank, pp_size, num_layers, num_mtp)] for rank in range(pp_size)
    ]


def test_even_stages():
    assert layers(PipelineLayout(), 2, 4) == [[[0, 1]], [[2, 3]]]


def test_virtual_stages_interleave():
    assert layers(PipelineLayout(virtual_size=2), 2, 8) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_uneven_first_and_last_stage():
    pipeline = PipelineLayout(num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2)
    assert layers(pipeline, 3, 6) == [[[0]], [[1, 2, 3]], [[4, 5]]]


def test_uneven_virtual_stages():
    pipeline = PipelineLayout(virtual_size=2, num_layers_in_first_pipeline_stage=2)
    assert layers(pipeline, 2, 6) == [[[0], [3]], [[1, 2], [4, 5]]]


def test_embedding_and_loss_count_as_layers():
    pipeline = PipelineLayout(account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True)
    assert layers(pipeline, 3, 4) == [[[0]], [[1, 2]], [[3]]]


def test_listed_stages_may_hold_the_embedding_alone():
    chunks = [PipelineLayout(stages="E|t*3|(t|)*2mL").chunks(rank, 5, 5, 1)[0] for rank in range(5)]
    assert [list(chunk.layers) for chunk in chunks] == [[], [0, 1, 2], [3], [4], []]
    assert [chunk.has_embedding for chunk in chunks] == [True, False, False, False, False]
    assert [chunk.has_mtp and chunk.has_output for chunk in chunks] == [False, False, False, False, True]


def test_stages_expand_as_in_megatron():
    assert parse_stages("Ettt|(tt|)*2,m|L") == ["Ettt", "tt", "tt", "m", "L"]


@pytest.mark.parametrize(
    ("pipeline", "pp_size", "num_layers", "message"),
    [
        (PipelineLayout(), 4, 6, r"6 layers do not divide into pp_size 4 equal stages"),
        (PipelineLayout(virtual_size=2), 2, 6, r"3 layers of pipeline rank 0 do not divide into virtual_size 2 chunks"),
        (PipelineLayout(num_layers_in_first_pipeline_stage=9), 2, 6, r"leave -3 of 6 layers for 1 pipeline ranks"),
        (
            PipelineLayout(num_layers_in_first_pipeline_stage=1, account_for_loss_in_pipeline_split=True),
            2,
            6,
            r"cannot be combined",
        ),
        (PipelineLayout(stages="Ett|tx|L"), 3, 4, r"got x, expected E, t, m, L"),
        (PipelineLayout(stages="Ett|t|L"), 2, 4, r"3 stages do not divide by pp_size 2; got 3 layers"),
        (PipelineLayout(stages="tEt|ttL"), 2, 4, r"expected E, 4 t, 0 m and L in this order"),
    ],
)
def test_impossible_stages_are_explained(pipeline, pp_size, num_layers, message):
    with pytest.raises(LayoutError, match=message):
        pipeline.chunks(0, pp_size, num_layers, 0)
