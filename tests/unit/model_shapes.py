"""Shapes of jobs for the tests of agent/model."""

from __future__ import annotations

from hypothesis import strategies as st

from railscope.agent.model.shape import Shape

GPT_3B = Shape(
    layers=54,
    hidden=2000,
    sequence=1024,
    vocabulary=50_257,
    global_batch=1024,
    micro_batch=32,
    pipeline=4,
    tensor=2,
    data=4,
)
"""The paper's worked example."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any small job that is possible, also with sizes that divide badly."""
    pipeline, tensor, data = (draw(st.integers(1, 5)) for _ in range(3))
    micro_batch = draw(st.integers(1, 3))
    return Shape(
        layers=draw(st.integers(pipeline, pipeline + 7)),
        hidden=tensor * draw(st.integers(1, 9)),
        sequence=draw(st.integers(1, 9)),
        vocabulary=draw(st.integers(1, 1000)),
        global_batch=micro_batch * data * draw(st.integers(1, 4)),
        micro_batch=micro_batch,
        pipeline=pipeline,
        tensor=tensor,
        data=data,
        recompute=draw(st.booleans()),
    )
