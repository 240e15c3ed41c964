"""Alerts on GPUs' NVLinks and on the fabric between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from railscope.agent.facts import catalogue
from railscope.agent.facts.causes import Severity
from railscope.dashboards import recorded
from railscope.dashboards.alerting.alert import Alert, Group, promql
from railscope.dashboards.alerting.thresholds import Thresholds

_PAGE: Final = "NVLinkErrors"
_BROKEN: Final = 'kind="recovery_failed"'
_DAMAGED: Final = 'kind!~"recovery.*"'
_DOWN: Final = (
    f"{{{{ with printf \"{catalogue.NVLINK_UP}{{cluster='%s',instance='%s',gpu='%s'}} == 0\" "
    '$labels.cluster $labels.instance $labels.gpu | query | sortByLabel "link" }}; these are not:'
    "{{ range . }} {{ .Labels.link }}{{ end }}{{ end }}"
)


def alerts(least: Thresholds) -> Iterator[Alert]:
    """Alerts on NVLinks and their fabric, in the order of the rules' file."""
    yield Alert(
        Group.NVLINKS,
        "RailscopeNVLinksDown",
        Severity.WARNING,
        promql(
            f"""
            {recorded.NVLINKS_UP} < {recorded.NVLINKS_UP_GREATEST}
            or
            (
                ({recorded.NVLINKS_UP} > 0)
              < on (cluster, job, instance) group_left ()
                quantile by (cluster, job, instance) (0.5, {recorded.NVLINKS_UP} > 0)
            )
            """
        ),
        about="Fewer links than the GPU had, or than most GPUs of its host have.  A GPU without a bridge has none, and "
        "never had.",
        holds_for="1m",
        because="A GPU that is being reset is back by then.",
        summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} has lost NVLinks",
        description=f"{{{{ $value }}}} NVLinks of GPU {{{{ $labels.gpu }}}} are up{_DOWN}.",
        page=_PAGE,
    )
    yield Alert(
        Group.NVLINKS,
        "RailscopeNVLinkErrors",
        Severity.WARNING,
        promql(
            f"""
            rate({catalogue.GPU_NVLINK_ERRORS.where(_DAMAGED)}[15m]) > {least.nvlink_errors_per_second:g}
            or
            rate({catalogue.GPU_NVLINK_ERRORS.where(_BROKEN)}[15m]) > 0
            """
        ),
        about="Damaged packets are sent again, and a few are normal; a link that could not be trained anew is "
        "broken.  RailscopeNVLinkRecovers tells of links that were trained anew.",
        holds_for="5m",
        because="Links that have just been trained count some errors.",
        summary="NVLinks of GPU {{ $labels.gpu }} of {{ $labels.instance }} count errors ({{ $labels.kind }})",
        description="{{ $labels.kind }} errors of GPU {{ $labels.gpu }}'s NVLinks rise by {{ $value | humanize }} a "
        "second.",
        page=_PAGE,
    )
    yield Alert(
        Group.NVLINKS,
        "RailscopeNVLinkFabricUnhealthy",
        Severity.WARNING,
        f"{catalogue.GPU_FABRIC_UNHEALTHY} == 1",
        holds_for="1m",
        because="The fabric is being set up when a host or its fabric manager starts.",
        summary="The NVLink fabric of GPU {{ $labels.gpu }} of {{ $labels.instance }} is unhealthy: "
        "{{ $labels.reason }}",
        description="GPU {{ $labels.gpu }} of {{ $labels.instance }} reports {{ $labels.reason }} of its NVLink "
        "fabric. Jobs that reach other GPUs over it are slow, or fail.",
        page=_PAGE,
    )
