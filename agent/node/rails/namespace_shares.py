"""How much of the agent the network namespaces of one tenant may take: devices, namespaces, and time of the loop.

Any user may make network namespaces, and in them devices without end.  What is looked at there is bounded by tenant:
so many devices in all of the namespaces that processes of this tenant came with, so many namespaces, a tenth of the
loop's time, and in a namespace that tenants share as many values of NCCL_SOCKET_IFNAME as the others leave free.  A
namespace that root made, as the host's own and those of containers, has a bound of its own, far above any machine's;
one that root's processes came with has none.

A namespace whose devices would exceed the share is not watched at all: a part of a job's rails would tell of the wrong
ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final

from railscope.agent.node.inspection.tenants import ROOT, Tenant
from railscope.probes.clock import Clock
from railscope.probes.processes.namespaces import NetworkNamespace, made_by_root

MOST_DEVICES: Final = 256
"""Of a tenant, in all namespaces that no one but a tenant can have made."""
MOST_DEVICES_BY_ROOT: Final = 2048
"""In one namespace that root made: hosts have a device for each pod."""
MOST_NAMESPACES: Final = 32
MOST_SETTINGS: Final = 64
"""Different values of NCCL_SOCKET_IFNAME in a namespace that add rails to NCCL's own choice."""
_REST: Final = 10
_ALLOWANCE_NS: Final = 1_000_000_000
"""Looking takes a tenth of the time, and a tenth of this at once; what comes beyond that is seen at a later tick."""
_AVOIDED_NS: Final = 60_000_000_000
"""A namespace with too many devices is not looked at again for so long."""
_MOST_AVOIDED: Final = 4096


@dataclass(slots=True)
class Account:
    """What the namespaces of one tenant take, or one namespace that root made."""

    key: Hashable
    """The tenant, or the inode of the namespace."""
    tenant: Tenant
    most_devices: int | None
    """None: it is trusted."""
    namespaces: dict[int, int] = field(default_factory=dict)
    """Devices in each that is watched, by inode."""
    paid_ns: int = 0
    """Until when its share of the time is used up by what was looked at."""

    def is_spent(self, now_ns: int) -> bool:
        """Whether looking has to wait for a later tick."""
        return self.paid_ns - now_ns > _ALLOWANCE_NS

    def pay(self, began_ns: int, ended_ns: int) -> None:
        """A look took this long."""
        self.paid_ns = max(self.paid_ns, began_ns) + _REST * (ended_ns - began_ns)

    def room(self, netns: int) -> int | None:
        """Devices that this namespace may have; None: any number."""
        if self.most_devices is None:
            return None
        others = [count for inode, count in self.namespaces.items() if inode != netns]
        return max(0, self.most_devices - sum(others)) if len(others) < MOST_NAMESPACES else 0


class NamespaceShares:
    """Not thread-safe: the daemon's lock guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[Hashable, Account] = {}
        self._avoided: dict[int, int] = {}
        """Until when namespaces with too many devices are left alone, by inode, ns."""
        self.refused_by_user: Counter[int | None] = Counter()
        """Namespaces whose rails are not shown, by the uid of whose processes live there."""
        self.unread_by_user: Counter[int | None] = Counter()
        """Values of NCCL_SOCKET_IFNAME that add no rails, by the uid of whose processes have them."""

    def account(self, namespace: NetworkNamespace, tenant: Tenant) -> Account:
        """Whose share a namespace is taken from; of tenants whose processes live there, the first one's."""
        if tenant != ROOT and not made_by_root(namespace):
            return self.account_of_tenant(tenant)
        account = self._accounts.get(namespace.inode)
        if account is None:
            most = None if tenant == ROOT else MOST_DEVICES_BY_ROOT
            account = self._accounts[namespace.inode] = Account(namespace.inode, tenant, most)
        return account

    def account_of_tenant(self, tenant: Tenant) -> Account:
        """What a tenant's own namespaces, and its processes' settings, are taken from."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, tenant, None if tenant == ROOT else MOST_DEVICES)
        return account

    def is_avoided(self, netns: int) -> bool:
        """Whether a namespace was refused lately."""
        return self._avoided.get(netns, 0) > self._clock.monotonic_ns()

    def refuse(self, netns: int, tenant: Tenant) -> None:
        """A namespace has more devices than its tenant may have."""
        now_ns = self._clock.monotonic_ns()
        if len(self._avoided) >= _MOST_AVOIDED:
            self._avoided = {inode: until for inode, until in self._avoided.items() if until > now_ns}
        if len(self._avoided) < _MOST_AVOIDED:
            self._avoided[netns] = now_ns + _AVOIDED_NS
        self.refused_by_user[tenant.uid] += 1

    def forget_idle(self) -> None:
        """Drop accounts of which nothing is watched, and that owe no time."""
        now_ns = self._clock.monotonic_ns()
        self._accounts = {key: one for key, one in self._accounts.items() if one.namespaces or one.paid_ns > now_ns}


def share_settings(settings: Iterable[tuple[Tenant, str]]) -> tuple[tuple[str, ...], frozenset[tuple[Tenant, str]]]:
    """The values of NCCL_SOCKET_IFNAME that count, and those that do not, with whose they are.

    `settings` come in the order in which processes did.  Each tenant's first value counts before anybody's second one.
    """
    of_tenants: dict[Tenant, list[str]] = {}
    for tenant, value in dict.fromkeys(settings):
        of_tenants.setdefault(tenant, []).append(value)
    turns = sorted(
        ((turn, tenant, value) for tenant, values in of_tenants.items() for turn, value in enumerate(values)),
        key=lambda one: one[0],
    )
    values = tuple(dict.fromkeys(value for _turn, _tenant, value in turns))
    counted = frozenset(values[:MOST_SETTINGS])
    return values[:MOST_SETTINGS], frozenset((tenant, value) for _turn, tenant, value in turns if value not in counted)
