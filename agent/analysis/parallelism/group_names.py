"""What a framework's name of a process group says of its purpose.

PyTorch's flight recorder and its traces name groups: Megatron-LM's are TENSOR_MODEL_PARALLEL_GROUP and the like,
TorchTitan's and DeviceMesh's `mesh_tp`, `dp_shard`, …; `default_pg` or a bare number says nothing.
"""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = (
    ("embedding", ("embedding", "embd", "position_embedding")),
    ("dp", ("expert_data", "edp", "data_parallel", "data_model_parallel_replica", "fsdp", "dp", "dp_shard",
            "dp_replicate", "ddp", "hsdp", "zero")),
    ("ep", ("expert_model_parallel", "expert_parallel", "ep", "moe")),
    ("pp", ("pipeline", "pipeline_model_parallel", "pp")),
    ("tp", ("tensor", "tensor_model_parallel", "tp")),
)  # fmt: skip
"""Roles and the words that name them; the first that is found counts."""
_PATTERNS: Final = tuple(
    (role, re.compile(rf"(?<![a-z])(?:{'|'.join(sorted(words, key=len, reverse=True))})(?![a-z])"))
    for role, words in _WORDS
)


def role_of_name(group_name: str) -> str:
    """`tp`, `pp`, `dp`, `embedding`, `ep`, or an empty string: the name says nothing."""
    name = group_name.lower().replace("-", "_")
    if "_and_" in name or ("tensor" in name and "data_parallel" in name):
        return ""  # several dimensions at once
    return next((role for role, pattern in _PATTERNS if pattern.search(name)), "")
