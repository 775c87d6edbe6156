"""Pages of other sites in a user's browser get nothing from the server, and cannot make it do anything."""

import pytest
import serve_tiny
from nxd_trace.serving import AllowedSites, CompletionService, make_app
from starlette.testclient import TestClient

GREEDY = {"prompt": "once upon", "max_tokens": 2, "temperature": 0}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def ask(tiny_generator):
    """`ask(allowed, method, headers)`: the answer to a request with these headers."""

    def answer(allowed, method, headers):
        app = make_app(CompletionService(tiny_generator.engine, serve_tiny.Letters(), model="tiny"), allowed)
        with TestClient(app, base_url="http://localhost:8000") as client:
            path = "/v1/models" if method == "GET" else "/v1/completions"
            return client.request(method, path, json=GREEDY if method == "POST" else None, headers=headers)

    return answer


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"Host": "evil.example:8000"}, 421),
        ("GET", {"Host": ""}, 421),
        ("GET", {"Host": "localhost.evil.example"}, 421),
        ("GET", {"Host": "127.0.0.1.evil.example"}, 421),
        ("GET", {"Host": "user@localhost"}, 421),
        ("GET", {"Host": "127.0.0.1:8000"}, 200),
        ("GET", {"Host": "[::1]:8000"}, 200),
        ("GET", {"Host": "LOCALHOST"}, 200),
        ("GET", {"Origin": "http://evil.example"}, 403),
        ("POST", {"Origin": "http://evil.example"}, 403),
        ("POST", {"Origin": "null"}, 403),
        ("POST", {"Origin": "http://localhost:3000"}, 403),
        ("POST", {"Origin": "http://localhost:8000"}, 200),
        ("POST", {"Content-Type": "text/plain"}, 415),
        ("POST", FORM, 415),
        ("POST", {"Content-Type": "application/json; charset=utf-8"}, 200),
        ("OPTIONS", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}, 403),
    ],
)
def test_request_of_another_site_is_refused(ask, method, headers, status):
    response = ask(None, method, headers)

    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origin", ["https://chat.example", "*"])
def test_pages_of_an_allowed_origin_may_call_the_server_by_an_allowed_host(ask, origin):
    allowed = AllowedSites(hosts=("llm.internal",), origins=(origin,))
    headers = {"Host": "llm.internal:8000", "Origin": "https://chat.example"}

    preflight = ask(allowed, "OPTIONS", headers | {"Access-Control-Request-Method": "POST"})
    answer = ask(allowed, "POST", headers)

    assert (preflight.status_code, answer.status_code) == (200, 200)
    assert preflight.headers["access-control-allow-origin"] == answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "wrong", [{"origins": ("chat.example",)}, {"origins": ("https://chat.example/",)}, {"hosts": ("http://a",)}]
)
def test_sites_that_no_header_would_name_are_refused(wrong):
    with pytest.raises(ValueError, match=r"is not (a host name|scheme://host)"):
        AllowedSites(**wrong)
