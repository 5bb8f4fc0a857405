"""Layers on pipeline stages: even, uneven, interleaved and explicit, against Megatron's own parser."""

import pytest

from megatron_dapo.parallel.stages import parse_layout, split_layers


def layers_of(stages, pp, chunk=0):
    return next(s.layers for s in stages if (s.pp, s.chunk) == (pp, chunk))


def test_interleaved_order():
    stages = split_layers(8, pipeline=2, virtual_pipeline=2)
    assert layers_of(stages, 0, 0) == (0, 1) and layers_of(stages, 1, 0) == (2, 3)
    assert layers_of(stages, 0, 1) == (4, 5) and layers_of(stages, 1, 1) == (6, 7)
    assert [s.embedding for s in stages] == [True, False, False, False]
    assert [s.head for s in stages] == [False, False, False, True]


def test_uneven_ends():
    stages = split_layers(7, pipeline=4, first=1, last=2)
    assert [len(s.layers) for s in stages] == [1, 2, 2, 2]
    assert [len(s.layers) for s in split_layers(4, pipeline=2, first=1, last=3)] == [1, 3]
    assert [len(s.layers) for s in split_layers(5, pipeline=2, first=1)] == [1, 4]


@pytest.mark.parametrize("layout", ["Ett|tt|tL", "E|(tt|)*2,tL", "Et*3|(t|)*2,tt|L", "Etttt|L"])
def test_layout_strings_as_megatron_reads_them(layout):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout.parse_str_to_list(layout)
    assert [len(group) for group in parse_layout(layout)] == [len(stage) for stage in theirs]
    count = sum(group.count("t") for group in parse_layout(layout))
    stages = split_layers(count, pipeline=len(theirs), layout=layout)
    assert [len(s.layers) for s in stages] == [sum(kind.name == "decoder" for kind in stage) for stage in theirs]
    assert [layer for s in stages for layer in s.layers] == list(range(count))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(layers=5, pipeline=2), "5 layers do not divide"),
        (dict(layers=4, pipeline=2, virtual_pipeline=4), "do not divide into virtual_pipeline 4"),
        (dict(layers=4, pipeline=2, first=3, last=3), "do not divide"),
        (dict(layers=4, pipeline=2, layout="Ett|t|tL"), "has 3 stages"),
        (dict(layers=5, pipeline=2, layout="Ett|ttL"), "places 4 layers"),
        (dict(layers=4, pipeline=2, layout="tt|ttL"), "must begin with E"),
        (dict(layers=4, pipeline=2, layout="Exx|ttL"), "contains"),
    ],
)
def test_impossible_splits(arguments, message):
    with pytest.raises(ValueError, match=message):
        split_layers(**arguments)
