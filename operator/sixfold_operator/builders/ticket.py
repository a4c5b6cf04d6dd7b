"""Ticket -> its manifest. Pure."""

from __future__ import annotations

from sixfold_api.names import API_VERSION, POLICY_LABEL, TICKET_KIND
from sixfold_operator.builders.common import Manifest, child
from sixfold_operator.control.tickets import Ticket


def ticket_manifest(policy: Manifest, ticket: Ticket) -> Manifest:
    """The ticket, owned by its policy. The decision is left out: it is a human's field."""
    labels = {POLICY_LABEL: policy["metadata"]["name"]}
    spec = ticket.spec.to_dict()
    spec.pop("decision", None)
    return {**child(policy, API_VERSION, TICKET_KIND, ticket.name, labels), "spec": spec}
