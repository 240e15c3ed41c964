"""How long an iteration takes by the paper's equations 1 to 9, and what share of it is communication or bubble.

    T_iter = T_comp + T_TP + T_PP + T_DP + T_bubble
    T_TP = m · l/p · 6 · 2bsh · 2(t−1)/(t·C_TP)      4 instead of 6 without recomputation
    T_PP = m · 2 · 2bsh / C_PP                       0 without a pipeline
    T_DP = 2N/(p·t) · 2(d−1)/(d·C_DP)
    T_comp = 8·m·N·b·s / (p·t·μ·F)                   6 instead of 8 without recomputation
    T_bubble = (p−1) · (T_comp + T_PP + T_TP)/m
    R_comm = (T_TP + T_PP + T_DP)/T_iter,  R_bubble = T_bubble/T_iter, near (p−1)/(p−1+m) without T_DP

They spread layers and parameters evenly over the stages and let nothing overlap, so they are the same for both modes
of the volumes.  Computation costs 2 FLOP a parameter and token in the forward pass, 4 in the backward pass, and 2 more
where the forward pass is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Final

from railscope.agent.model.parameters import total_parameters
from railscope.agent.model.shape import ELEMENT_BYTES, Shape, ShapeError
from railscope.agent.model.volumes import allreduces_of_a_layer

_FLOP_OF_PARAMETER_AND_TOKEN: Final = 6
_RECOMPUTED_FLOP: Final = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machines reach; C_… are effective bandwidths of one rank, as nccl-tests' bus bandwidth.

    Raises:
        ShapeError: a rate is not above 0, or the utilisation is above 1.
    """

    tp_bytes_per_second: float
    pp_bytes_per_second: float
    dp_bytes_per_second: float
    peak_flop_per_second: float
    """Of one GPU."""
    utilisation: float
    """The part of the peak that computation reaches (μ), 0 to 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ShapeError(f"{field.name.replace('_', ' ')} is {value}: it must be above 0")
        if self.utilisation > 1:
            raise ShapeError(f"utilisation is {self.utilisation}: it must be at most 1")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one iteration by what they are spent on, and their ratios."""

    t_comp: float
    t_tp: float
    t_pp: float
    t_dp: float
    t_bubble: float

    @property
    def t_iter(self) -> float:
        return self.t_comp + self.t_tp + self.t_pp + self.t_dp + self.t_bubble

    @property
    def r_comm(self) -> float:
        """Communication's share of the iteration."""
        return (self.t_tp + self.t_pp + self.t_dp) / self.t_iter

    @property
    def r_bubble(self) -> float:
        """The bubble's share of the iteration."""
        return self.t_bubble / self.t_iter


def estimate_times(shape: Shape, rates: Rates) -> Times:
    """Seconds of one iteration of a job, by the analytical model."""
    even_layers = Fraction(shape.layers, shape.pipeline)
    even_parameters = Fraction(total_parameters(shape), shape.pipeline * shape.tensor)
    micro_batches, stages = shape.micro_batches, shape.pipeline
    tp_bytes = (
        micro_batches
        * even_layers
        * allreduces_of_a_layer(shape)
        * shape.activation_bytes
        * Fraction(2 * (shape.tensor - 1), shape.tensor)
    )
    pp_bytes = micro_batches * 2 * shape.activation_bytes if stages > 1 else 0
    dp_bytes = ELEMENT_BYTES * even_parameters * Fraction(2 * (shape.data - 1), shape.data)
    flop_each = _FLOP_OF_PARAMETER_AND_TOKEN + (_RECOMPUTED_FLOP if shape.recompute else 0)
    flop = flop_each * micro_batches * even_parameters * shape.micro_batch * shape.sequence
    t_tp = float(tp_bytes) / rates.tp_bytes_per_second
    t_pp = float(pp_bytes) / rates.pp_bytes_per_second
    t_comp = float(flop) / (rates.utilisation * rates.peak_flop_per_second)
    return Times(
        t_comp=t_comp,
        t_tp=t_tp,
        t_pp=t_pp,
        t_dp=float(dp_bytes) / rates.dp_bytes_per_second,
        t_bubble=(stages - 1) * (t_comp + t_pp + t_tp) / micro_batches,
    )


def r_bubble_without_dp(shape: Shape) -> Fraction:
    """The bubble's share of an iteration without T_DP: (p−1)/(p−1+m)."""
    return Fraction(shape.pipeline - 1, shape.pipeline - 1 + shape.micro_batches)
