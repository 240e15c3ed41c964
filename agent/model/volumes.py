"""What one rank of a pipeline stage hands to NCCL in an iteration: payload, by the parallelism that sends it.

tp: an AllReduce of 2bsh at each of 6 places in a layer (4 without recomputation) for each micro-batch, and one more for
the vocabulary-parallel embedding of the first stage; by the paper m · l/p · 6 (equation 2).

pp_send, pp_recv: 2bsh a micro-batch to and from each neighbouring stage; by the paper m (equation 3, one neighbour).

dp: one AllReduce of 2 bytes for each parameter of the rank; by the paper one of 2N/(p·t) (equation 4).

embedding_sync: one AllReduce of the word embedding's gradients between the first and the last stage; the paper's
equations have none.

loss: three AllReduces of 4bs, one number of float32 a token, for the vocabulary-parallel loss of each micro-batch; and
one more AllReduce of 2bsh in tp, for the gradients that the output layer sends back.  Both are of the last stage, and
counted where the shape says so (`Shape.output_layer`): the published equations and jobs without a loss have none.

A dimension of one rank sends nothing, in both.  What is in neither: the few bytes of loss averages, gradient norms and
overflow checks.

Source: megatron/core/tensor_parallel/layers.py and cross_entropy.py of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from railscope.agent.model.parameters import gradient_parameters, word_embedding_parameters
from railscope.agent.model.shape import ELEMENT_BYTES, Mode, Shape

_ALLREDUCES_OF_A_LAYER: Final = 4
"""Two in the forward pass, after attention and after the feed-forward part, and two in the backward pass."""
_RECOMPUTED_ALLREDUCES: Final = 2
"""The forward pass's again."""
_ALLREDUCES_OF_A_LOSS: Final = 3
"""The largest logit of a token, the predicted one, and the sum of exponentials."""
_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Volume:
    """Equal messages of one rank in one iteration."""

    messages: Fraction
    """Whole, but for the paper's l/p layers where p does not divide l."""
    message_bytes: int
    """Payload of one, always of whole elements; 0 where there are no messages."""

    @property
    def bytes(self) -> int:
        """Payload of all; of whole elements, rounded to one where messages are not whole."""
        return round(self.messages * self.message_bytes / ELEMENT_BYTES) * ELEMENT_BYTES


_NOTHING: Final = Volume(Fraction(0), 0)


@dataclass(frozen=True, slots=True)
class StageVolumes:
    """Payload of one rank of a stage in an iteration; every rank of the stage has the same."""

    tp: Volume
    """AllReduces among the tensor ranks."""
    pp_send: Volume
    """Sends to neighbouring stages: activations on, gradients back."""
    pp_recv: Volume
    dp: Volume
    """AllReduce of gradients among replicas."""
    embedding_sync: Volume
    """AllReduce of the word embedding's gradients between the first and the last stage."""
    loss: Volume
    """AllReduces among the tensor ranks of the last stage, for the loss."""


def stage_volumes(shape: Shape, mode: Mode, stage: int) -> StageVolumes:
    """What a rank of this pipeline stage hands to NCCL in an iteration, by the model.

    Raises:
        ShapeError: there is no such stage.
    """
    shape.check_stage(stage)
    transfers = _pipeline_volume(shape, mode, stage)
    return StageVolumes(
        tp=_tensor_volume(shape, mode, stage),
        pp_send=transfers,
        pp_recv=transfers,
        dp=_data_volume(shape, mode, stage),
        embedding_sync=_embedding_volume(shape, mode, stage),
        loss=_loss_volume(shape, mode, stage),
    )


def allreduces_of_a_layer(shape: Shape) -> int:
    """AllReduces among tensor ranks for one layer and micro-batch."""
    return _ALLREDUCES_OF_A_LAYER + (_RECOMPUTED_ALLREDUCES if shape.recompute else 0)


def _tensor_volume(shape: Shape, mode: Mode, stage: int) -> Volume:
    if shape.tensor == 1:
        return _NOTHING
    if mode is Mode.PAPER:
        per_micro_batch = Fraction(shape.layers * allreduces_of_a_layer(shape), shape.pipeline)
    else:
        embedding = 1 if shape.is_first(stage) else 0
        output = 1 if shape.output_layer and shape.is_last(stage) else 0
        per_micro_batch = Fraction(shape.stage_layers(stage) * allreduces_of_a_layer(shape) + embedding + output)
    return Volume(shape.micro_batches * per_micro_batch, shape.activation_bytes)


def _pipeline_volume(shape: Shape, mode: Mode, stage: int) -> Volume:
    if shape.pipeline == 1:
        return _NOTHING
    neighbours = 1 if mode is Mode.PAPER or shape.is_first(stage) or shape.is_last(stage) else 2
    return Volume(Fraction(shape.micro_batches * neighbours), shape.activation_bytes)


def _data_volume(shape: Shape, mode: Mode, stage: int) -> Volume:
    if shape.data == 1:
        return _NOTHING
    return Volume(Fraction(1), round(gradient_parameters(shape, mode, stage)) * ELEMENT_BYTES)


def _embedding_volume(shape: Shape, mode: Mode, stage: int) -> Volume:
    at_an_end = shape.is_first(stage) or shape.is_last(stage)
    if mode is Mode.PAPER or shape.pipeline == 1 or not at_an_end:
        return _NOTHING
    return Volume(Fraction(1), word_embedding_parameters(shape) * ELEMENT_BYTES)


def _loss_volume(shape: Shape, mode: Mode, stage: int) -> Volume:
    counted = mode is Mode.EXACT and shape.output_layer and shape.is_last(stage)
    if shape.tensor == 1 or not counted:
        return _NOTHING
    return Volume(
        Fraction(shape.micro_batches * _ALLREDUCES_OF_A_LOSS), shape.micro_batch * shape.sequence * _FLOAT32_BYTES
    )
