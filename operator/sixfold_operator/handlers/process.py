"""Start and end of the process: kopf's settings, the API connection, the controller, the HTTP endpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

import kopf

from sixfold_api.names import API_VERSION, GROUP, POLICY_KIND, TICKET_KIND, TICKET_PLURAL, VARIANT_KIND, VERSION
from sixfold_operator import health, metrics
from sixfold_operator.controller import CHILD_SELECTOR, Controller
from sixfold_operator.kube import FIELD_MANAGER, PAGE_ITEMS, ApiError, Kube
from sixfold_operator.lease import Election
from sixfold_operator.settings import OperatorSettings

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
LOST_LEASE_EXIT_CODE = 3


@kopf.on.login()
def login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """kopf's own connection, without importing another client for it. In a pod the API's address comes from the
    environment: cluster DNS may not be up yet."""
    info = kopf.login_with_service_account(**arguments)
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if info is not None and host and port:
        address = f"[{host}]" if ":" in host else host
        return dataclasses.replace(info, server=f"https://{address}:{port}")
    return info or kopf.login_with_kubeconfig(**arguments)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Returns once the cache is filled; only then does kopf begin to watch. Whether this operator acts or stands by is
    decided in the background."""
    configure(settings)
    memo.kube = await Kube.connect()
    memo.election = _election(memo.settings, memo.kube)
    role = memo.election.role if memo.election else lambda: "leader"
    if memo.election:
        memo.kube.may_write = memo.election.leads
    memo.controller = Controller(memo.settings, memo.kube)
    probes = (memo.controller.stalled, memo.controller.unready, role)
    memo.http, port = await health.serve(memo.settings.metrics_port, *probes)
    log.info("serving /metrics, /healthz and /readyz", extra={"fields": {"port": port}})
    await _begin(memo.kube, memo.controller)
    if memo.election:
        memo.candidacy = asyncio.create_task(_hold(memo.election, memo.controller.lead), name="lease")
    else:
        metrics.LEADER.set(1)
        memo.controller.lead()
    log.info("watching", extra={"fields": {"namespaces": memo.settings.watch_namespaces or "all"}})


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """The Lease is released last: another operator acts from that moment on."""
    if "controller" in memo:
        await memo.controller.stop()
    if "candidacy" in memo:
        memo.candidacy.cancel()
        await asyncio.gather(memo.candidacy, return_exceptions=True)
        await memo.election.release()
    if "kube" in memo:
        await memo.kube.close()
    if "http" in memo:
        await memo.http.cleanup()


def _election(settings: OperatorSettings, kube: Kube) -> Election | None:
    if not settings.lease:
        return None
    namespace, name = settings.lease.split("/")
    identity = settings.identity or f"{socket.gethostname()}_{uuid.uuid4()}"
    return Election(kube, (namespace, name), identity, settings.lease_duration_seconds)


async def _hold(election: Election, begin: Callable[[], None]) -> None:
    """The process ends with its right to act, at once and whatever it is doing: its pod starts another one."""
    try:
        await election.run(begin)
        log.error("the Lease is lost; the process ends, so that no two operators act")
    except Exception:
        log.exception("holding the Lease failed; the process ends, so that no two operators act")
    os._exit(LOST_LEASE_EXIT_CODE)


def configure(settings: kopf.OperatorSettings) -> None:
    """No finalizers, no annotations, no scanning of CRDs and namespaces; long back-offs instead of giving up."""
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP, v1=False)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP, v1=False)
    settings.posting.level = logging.WARNING
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 10
    # Right after the start every object of the cluster passes by: some at a time, and each is let go of at once.
    settings.watching.chunk_size = PAGE_ITEMS
    settings.queueing.idle_timeout = 0.1
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 8, 13, 21) + (30,) * 20
    for kind in ("pods", "services", "configmaps"):
        settings.watching.label_selectors["", "v1", kind] = CHILD_SELECTOR
    settings.watching.label_selectors[GROUP, VERSION, TICKET_PLURAL] = CHILD_SELECTOR
    settings.watching.label_selectors["apps", "v1", "deployments"] = CHILD_SELECTOR
    settings.watching.label_selectors["batch", "v1", "jobs"] = CHILD_SELECTOR
    settings.watching.label_selectors["policy", "v1", "poddisruptionbudgets"] = CHILD_SELECTOR
    for kind in ("networkpolicies", "ingresses"):
        settings.watching.label_selectors["networking.k8s.io", "v1", kind] = CHILD_SELECTOR


async def _begin(kube: Kube, controller: Controller) -> None:
    """Start the controller once the API answers and serves all kinds: the chart may start this pod before its
    CRDs are there, and kopf would then watch nothing, for ever."""
    wanted = {POLICY_KIND, VARIANT_KIND, TICKET_KIND}
    while True:
        try:
            missing = wanted - await kube.serves(API_VERSION)
            if not missing:
                return await controller.start()
            log.warning("waiting for the CRDs of %s: install the chart's or kubectl apply -f crds/", sorted(missing))
        except ApiError as error:
            log.warning("the API can't be listed yet: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


def run(settings: OperatorSettings) -> None:
    """Run until SIGTERM."""
    # kopf asks for the name of the user, and a container's user may have none.
    os.environ.setdefault("USER", FIELD_MANAGER)
    kopf.run(
        memo=kopf.Memo(settings=settings),
        standalone=True,
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
    )
