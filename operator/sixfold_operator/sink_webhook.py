"""Tickets as CloudEvents 1.0 (structured JSON), signed as Standard Webhooks says."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from datetime import datetime

import aiohttp

from sixfold_api.conditions import timestamp
from sixfold_operator.sink_http import call
from sixfold_operator.sinks import Message, SinkConfig, SinkError

TYPES = {"Open": "opened", "Applied": "applied", "Resolved": "resolved", "Dismissed": "dismissed"}


async def tell(session: aiohttp.ClientSession, sink: SinkConfig, message: Message, now: datetime) -> str:
    """Post the event; a repeat has the same id. Returns the id. Raises SinkError."""
    body = json.dumps(event(message, now), separators=(",", ":")).encode()
    seconds = str(int(now.timestamp()))
    headers = {
        "Content-Type": "application/cloudevents+json",
        "webhook-id": message.id,
        "webhook-timestamp": seconds,
        "webhook-signature": signature(sink.secret(), message.id, seconds, body),
    }
    await call(session, "POST", sink.url or "", headers, body)
    return message.id


def event(message: Message, now: datetime) -> dict[str, object]:
    """The CloudEvent."""
    policy = message.spec.policy_ref.name
    cluster = {"cluster": message.cluster} if message.cluster else {}
    prefix = f"/clusters/{message.cluster}" if message.cluster else ""
    return {
        "specversion": "1.0",
        "id": message.id,
        "source": f"{prefix}/namespaces/{message.namespace}/inferencepolicies/{policy}",
        "type": f"dev.sixfold.ticket.{TYPES[message.status.phase.value]}",
        "subject": message.ticket,
        "time": timestamp(now),
        "datacontenttype": "application/json",
        "data": {
            **cluster,
            "namespace": message.namespace,
            "ticket": message.ticket,
            "spec": message.spec.to_dict(),
            "phase": message.status.phase.value,
            "occurrences": message.status.occurrences,
        },
    }


def signature(secret: str, message_id: str, seconds: str, body: bytes) -> str:
    """HMAC-SHA256 over id, timestamp and body. A secret that begins with whsec_ is base64. Raises SinkError."""
    key = secret.encode()
    if secret.startswith("whsec_"):
        try:
            key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error as error:
            raise SinkError("the signing key begins with whsec_ and isn't base64 after it") from error
    signed = hmac.new(key, f"{message_id}.{seconds}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"
