"""The shape of a GPT-like training job, and what follows from it before anything is sent.

A job trains l transformer layers of hidden size h on sequences of s tokens, split over p pipeline stages, t tensor
ranks and d data-parallel replicas.  A global batch is m = gb/(b·d) micro-batches of b sequences a replica.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Final

ELEMENT_BYTES: Final = 2
"""Activations and gradients travel as fp16 or bf16."""
MOST_RANKS: Final = 1 << 20
"""A million GPUs: more is a typing error."""
_VOCABULARY_MULTIPLE: Final = 128
"""Megatron-LM pads the vocabulary so that each tensor rank holds a multiple of this."""


class ShapeError(ValueError):
    """No job can have this shape, mapping or placement; one line that says what is valid."""


class Mode(Enum):
    """How literally the published equations are taken."""

    EXACT = "exact"
    """The stages as they are split, with what only the first and the last one do."""
    PAPER = "paper"
    """The equations: every stage has l/p layers and N/p parameters, and no embedding is synchronised."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A job.  All sizes are whole and positive.

    Raises:
        ShapeError: no job can have this shape.
    """

    layers: int
    hidden: int
    sequence: int
    """Tokens in a sequence."""
    vocabulary: int
    """As the tokenizer has it, not padded."""
    global_batch: int
    """Sequences in an iteration."""
    micro_batch: int
    """Sequences that a replica takes at once."""
    pipeline: int
    """Stages (p)."""
    tensor: int
    """Ranks that share each layer (t)."""
    data: int
    """Replicas (d)."""
    recompute: bool = True
    """Whether activations are computed again in the backward pass."""
    output_layer: bool = False
    """Whether the AllReduces of the last stage's output layer and loss among tensor ranks count."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise ShapeError(f"{field.name.replace('_', ' ')} is {value}: it must be 1 or more")
        if self.pipeline > self.layers:
            raise ShapeError(
                f"{self.layers} layers cannot fill {self.pipeline} pipeline stages: each needs one, so choose at most "
                f"{self.layers} stages"
            )
        if self.hidden % self.tensor:
            raise ShapeError(
                f"hidden size {self.hidden} cannot be split over {self.tensor} tensor ranks: choose a divisor of "
                f"{self.hidden}"
            )
        step = self.micro_batch * self.data
        if self.global_batch % step:
            below = self.global_batch // step * step
            nearest = f"{below} or {below + step}" if below else f"{step}"
            raise ShapeError(
                f"global batch {self.global_batch} is not a multiple of micro-batch {self.micro_batch} × data "
                f"parallel {self.data} = {step}, so the number of micro-batches is not whole: choose {nearest}"
            )
        if self.ranks > MOST_RANKS:
            raise ShapeError(
                f"pipeline {self.pipeline} × tensor {self.tensor} × data {self.data} = {self.ranks} ranks: at most "
                f"{MOST_RANKS} are modelled"
            )

    @property
    def ranks(self) -> int:
        return self.pipeline * self.tensor * self.data

    @property
    def micro_batches(self) -> int:
        """Of one replica in an iteration (m)."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def activation_bytes(self) -> int:
        """What one micro-batch's activations, or their gradients, take between layers: 2bsh."""
        return ELEMENT_BYTES * self.micro_batch * self.sequence * self.hidden

    @property
    def padded_vocabulary(self) -> int:
        """The next multiple of 128·t."""
        multiple = _VOCABULARY_MULTIPLE * self.tensor
        return -(-self.vocabulary // multiple) * multiple

    def stage_layers(self, stage: int) -> int:
        """Layers of one stage: the first stages take ⌈l/p⌉, as long as every later one keeps a layer.

        Raises:
            ShapeError: there is no such stage.
        """
        self.check_stage(stage)
        ceiling = -(-self.layers // self.pipeline)

        def before(number: int) -> int:
            """Layers of the stages before this one."""
            return min(ceiling * number, self.layers - (self.pipeline - number))

        return before(stage + 1) - before(stage)

    def check_stage(self, stage: int) -> None:
        """Raises ShapeError unless the job has this stage."""
        if not 0 <= stage < self.pipeline:
            stages = f"stages 0 to {self.pipeline - 1}" if self.pipeline > 1 else "stage 0 only"
            raise ShapeError(f"there is no stage {stage}: the job has {stages}")

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.pipeline - 1
