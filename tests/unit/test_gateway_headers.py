"""What requests ask for in headers: what is there means something, and nobody gets more than they may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from sixfold_api.gateway import Priority
from sixfold_api.runtime_config import RequestLimits, TenantConfig
from sixfold_runtime.gateway.errors import ApiError
from sixfold_runtime.gateway.headers import Terms, asked_terms

LIMITS = RequestLimits(timeout_seconds=30.0)
TENANTS = (
    TenantConfig(name="urgent", priority=Priority.HIGH, max_priority=Priority.HIGH),
    TenantConfig(name="both", priority=Priority.NORMAL, max_priority=Priority.HIGH),
    TenantConfig(name="batch", priority=Priority.LOW, max_priority=Priority.LOW),
)


def terms(*headers: tuple[str, str], tenant: str = "") -> Terms:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return asked_terms(Headers(raw=raw), tenant, TENANTS, LIMITS)


def refused(*headers: tuple[str, str], tenant: str = "") -> ApiError:
    with pytest.raises(ApiError) as error:
        terms(*headers, tenant=tenant)
    return error.value


def test_without_headers_the_tenant_and_the_limits_decide() -> None:
    assert terms() == Terms(Priority.NORMAL, 30.0)
    assert [terms(tenant=name).priority for name in ("urgent", "both", "batch", "unlisted")] == [
        Priority.HIGH,
        Priority.NORMAL,
        Priority.LOW,
        Priority.NORMAL,
    ]


@pytest.mark.parametrize(
    ("tenant", "asked", "allowed"),
    [
        ("", "high", False),
        ("", "normal", True),
        ("", "low", True),
        ("unlisted", "high", False),
        ("urgent", "HIGH", True),
        ("urgent", "low", True),
        ("both", "high", True),
        ("batch", "normal", False),
        ("batch", "Low", True),
    ],
)
def test_a_priority_is_one_that_the_key_may_ask_for(tenant: str, asked: str, allowed: bool) -> None:
    if allowed:
        assert terms(("X-Priority", asked), tenant=tenant).priority.lower() == asked.lower()
    else:
        error = refused(("X-Priority", asked), tenant=tenant)
        assert (error.status, error.code, error.param) == (403, "priority_not_allowed", "X-Priority")
        assert error.body()["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Priority", "urgent"),
        ("X-Priority", ""),
        ("X-Priority", "1"),
        ("X-Request-Timeout", ""),
        ("X-Request-Timeout", "0"),
        ("X-Request-Timeout", "0.000"),
        ("X-Request-Timeout", "-1"),
        ("X-Request-Timeout", "1s"),
        ("X-Request-Timeout", "1e3"),
        ("X-Request-Timeout", "nan"),
        ("X-Request-Timeout", "inf"),
        ("X-Request-Timeout", "1_0"),
        ("X-Request-Timeout", "9" * 400),
        ("X-Conversation-Id", ""),
        ("X-Conversation-Id", "x" * 129),
        ("X-Conversation-Id", "a b"),
        ("X-Conversation-Id", "a/b"),
        ("X-Conversation-Id", "caf\xe9"),
        ("X-Conversation-Id", "a*"),
    ],
)
def test_what_means_nothing_is_refused_by_name(header: str, value: str) -> None:
    error = refused((header, value))
    assert (error.status, error.param) == (400, header)
    assert header in error.message


def test_a_time_limit_is_never_longer_than_the_servers() -> None:
    assert terms(("X-Request-Timeout", "2.5")) == Terms(Priority.NORMAL, 2.5, is_timeout_asked=True)
    assert terms(("X-Request-Timeout", "29.999999999")).is_timeout_asked
    assert terms(("X-Request-Timeout", "999999999")) == Terms(Priority.NORMAL, 30.0)


def test_a_conversation_has_any_harmless_name() -> None:
    for name in ("c", "x" * 128, "0b8d7c52-8f5e-4d6c-9b2b-1c1b6c9d1f00", "user:7_chat.3"):
        assert terms(("X-Conversation-Id", f" {name} ")).conversation == name


def test_a_header_that_comes_twice_says_the_same_twice() -> None:
    for header, one, other in (
        ("X-Priority", "low", "normal"),
        ("X-Request-Timeout", "1", "2"),
        ("X-Conversation-Id", "a", "b"),
    ):
        assert refused((header, one), (header, other)).param == header
        assert terms((header, one), (header, one)) == terms((header, one))


@given(st.sampled_from(["X-Priority", "X-Request-Timeout", "X-Conversation-Id"]), st.binary(max_size=140))
def test_any_bytes_are_terms_or_refused_politely(header: str, value: bytes) -> None:
    try:
        found = terms((header, value.decode("latin-1")))
    except ApiError as error:
        assert error.status in (400, 403)
        assert error.param == header
    else:
        assert 0 < found.timeout_seconds <= 30.0
        assert found.priority.rank <= Priority.NORMAL.rank
        assert found.conversation.isprintable()
        assert len(found.conversation) <= 128
