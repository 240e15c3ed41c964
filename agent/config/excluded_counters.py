"""Which counters an operator has left alone: `mlx5_1`, `mlx5_*/port_xmit_wait`."""

from __future__ import annotations

from railscope.agent.config.values import split_list


def parse_excluded_counters(text: str) -> str:
    """The entry of `--rail.counters.exclude` that `mlx5_1` or `mlx5_*/port_xmit_wait` is: DEVICE or DEVICE/COUNTER.

    Raises:
        ValueError: the entry has no device or no counter where it says that it has one, or holds several.
    """
    device, slash, counter = text.strip().partition("/")
    if len(split_list(text)) > 1:
        raise ValueError(f"excluded counters {text!r}: write each device or counter as an entry of its own")
    if not device or (slash and not counter):
        raise ValueError(
            f"excluded counters {text!r}: write DEVICE or DEVICE/COUNTER, such as mlx5_1 or */port_xmit_wait"
        )
    return text.strip()
