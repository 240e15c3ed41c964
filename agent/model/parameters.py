"""How many parameters a job has, and how many of them one rank holds.

The whole model by equation 10 of the paper, N = 12lh²(1 + 13/(12h) + (V+s)/(12lh)), which multiplied out has whole
terms.  A rank by what it really holds: of each layer on one of t tensor ranks the matrices (12h²) and the biases that
are split with them (7h) count 1/t, layer norms and the other biases (6h) in full; the first stage has the word
embedding, V_pad/t·h, and the position embedding, s·h; the last stage has the final layer norm (2h) and a copy of the
word embedding, unless it is the first stage too and shares it.

Source of a rank's: megatron/core/models/gpt/gpt_model.py and transformer/transformer_block.py of Megatron-LM.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Final

from railscope.agent.model.shape import Mode, Shape

_FINAL_NORM: Final = 2
"""Parameters a hidden dimension: weight and bias."""


def total_parameters(shape: Shape) -> int:
    """N of the whole model, each weight once, without padding (equation 10)."""
    layers, hidden = shape.layers, shape.hidden
    return 12 * layers * hidden**2 + 13 * layers * hidden + (shape.vocabulary + shape.sequence) * hidden


def layer_parameters(shape: Shape) -> int:
    """Parameters of one layer on one tensor rank."""
    hidden, tensor = shape.hidden, shape.tensor
    return (12 * hidden**2 + 7 * hidden) // tensor + 6 * hidden


def word_embedding_parameters(shape: Shape) -> int:
    """Parameters of the padded word embedding on one tensor rank."""
    return shape.padded_vocabulary // shape.tensor * shape.hidden


def rank_parameters(shape: Shape, stage: int) -> int:
    """Parameters that one rank of a stage holds.

    Raises:
        ShapeError: there is no such stage.
    """
    parameters = shape.stage_layers(stage) * layer_parameters(shape)
    if shape.is_first(stage):
        parameters += shape.sequence * shape.hidden
    if shape.is_first(stage) or shape.is_last(stage):
        parameters += word_embedding_parameters(shape)
    if shape.is_last(stage):
        parameters += _FINAL_NORM * shape.hidden
    return parameters


def gradient_parameters(shape: Shape, mode: Mode, stage: int) -> Fraction:
    """Parameters whose gradients one rank of a stage reduces: its own, or N/(p·t) by the paper."""
    if mode is Mode.EXACT:
        return Fraction(rank_parameters(shape, stage))
    return Fraction(total_parameters(shape), shape.pipeline * shape.tensor)
