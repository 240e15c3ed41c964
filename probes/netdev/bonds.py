"""Which members a bond has, and whether it takes their links for up.

A bond stays up while one of its members does, so that its own carrier hides the loss of half its speed.  What counts
is the bond's view of each member, which follows its configured monitoring (carrier or ARP): `mii_status`.

Sources: Linux drivers/net/bonding/bond_sysfs_slave.c and bond_main.c, include/uapi/linux/if_bonding.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railscope.probes.netdev.sysfs import read_text

LINK_UP: Final = 0
"""BOND_LINK_UP of IFLA_BOND_SLAVE_MII_STATUS; 1 to 3: going down, down, coming back."""


@dataclass(frozen=True, slots=True)
class BondMember:
    """One network device of a bond."""

    name: str
    up: bool | None
    """Whether the bond takes its link for up; None where it cannot be known."""


def bond_members(class_net: Path | str, bond: str) -> tuple[BondMember, ...]:
    """The members of a bond in `SYSFS/class/net`, as the bond lists them; none where `bond` is no bond."""
    names = read_text(f"{class_net}/{bond}/bonding/slaves").split()
    return tuple(BondMember(name, member_link(f"{class_net}/{name}")) for name in names if "/" not in name)


def member_link(folder: Path | str) -> bool | None:
    """Whether the bond that a network device belongs to takes its link for up.

    `folder` is the device's in `SYSFS/class/net`.  None: it belongs to no bond, or sysfs does not say.
    """
    status = read_text(f"{folder}/bonding_slave/mii_status")
    return status == "up" if status else None
