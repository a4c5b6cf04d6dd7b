"""What kwok's pods would answer on /state: `python fake_pods.py KUBECONFIG` serves each on the address that it has.

Like the real ones they go by the policy's ConfigMap, only that no kubelet has to bring it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from sixfold_api.names import COMPONENT_LABEL, ENGINE_PORT, GATEWAY, GATEWAY_PORT, POLICY_LABEL
from sixfold_api.runtime_config import PodState
from sixfold_operator.kube import Kube

LOOK_SECONDS = 0.5
Manifest = dict[str, Any]


@dataclass
class FakePods:
    """Addresses of the pods there are, and the configurations that they would have read."""

    kube: Kube
    pods: dict[str, Manifest] = field(default_factory=dict)
    configs: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    async def run(self) -> None:
        """Never returns."""
        app = web.Application()
        app.add_routes([web.get("/state", self._state)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        while True:
            await self._look(runner)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, runner: web.AppRunner) -> None:
        configs, _ = await self.kube.list("ConfigMap", None, POLICY_LABEL)
        for config_map in configs:
            document = json.loads(config_map["data"]["config.json"])
            place = config_map["metadata"]["namespace"], config_map["metadata"]["labels"][POLICY_LABEL]
            self.configs[place] = document["sequence"], document["stable"]["level"]
        pods, _ = await self.kube.list("Pod", None, POLICY_LABEL)
        for pod in pods:
            address = pod.get("status", {}).get("podIP")
            if address and address not in self.pods:
                await web.TCPSite(runner, address, GATEWAY_PORT if _is_gateway(pod) else ENGINE_PORT).start()
            if address:
                self.pods[address] = pod

    async def _state(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        metadata = self.pods[request.transport.get_extra_info("sockname")[0]]["metadata"]
        sequence, level = self.configs.get((metadata["namespace"], metadata["labels"][POLICY_LABEL]), (0, 0))
        role = metadata["labels"][COMPONENT_LABEL]
        state = PodState(role=role, pod=metadata["name"], ready=True, sequence=sequence, level=level)
        return web.json_response(state.to_dict())


def _is_gateway(pod: Manifest) -> bool:
    return bool(pod["metadata"]["labels"][COMPONENT_LABEL] == GATEWAY)


async def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.environ["KUBECONFIG"] = sys.argv[1]
    await FakePods(await Kube.connect()).run()


if __name__ == "__main__":
    asyncio.run(main())
