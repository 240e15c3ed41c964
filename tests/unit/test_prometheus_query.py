"""The client against a real HTTP server with canned answers: right requests, typed results, errors of one line."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from railscope.agent.cluster.fleet.prometheus import (
    Endpoint,
    NoAnswerError,
    PrometheusError,
    PrometheusStore,
    Sample,
    basic_header,
    bearer_header,
    parse_duration,
    parse_samples,
    parse_series,
    parse_time,
)
from tests.serving import QuietHandler, running


@dataclass
class Answers:
    """What the server says next, and what it was asked."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    refuse_post: bool = False
    asked: list[tuple[str, str, dict[str, list[str]], dict[str, str]]] = field(default_factory=list)

    def result(self, kind: str, result: object) -> None:
        self.body = json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()


class _Handler(QuietHandler):
    answers: Answers

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        url = urlsplit(self.path)
        given = parse_qs(self.rfile.read(length).decode() or url.query)
        self.answers.asked.append((self.command, url.path, given, {k.lower(): v for k, v in self.headers.items()}))
        status = 405 if self.answers.refuse_post and self.command == "POST" else self.answers.status
        self.send_response(status)
        for name, value in self.answers.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(self.answers.body)))
        self.end_headers()
        self.wfile.write(self.answers.body)

    do_GET = do_POST = _answer


@pytest.fixture
def answers() -> Answers:
    made = Answers()
    made.result("vector", [])
    return made


@pytest.fixture
def server(answers: Answers) -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (_Handler,), {"answers": answers})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    with running(made):
        yield made


@pytest.fixture
def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def refusal(store: PrometheusStore) -> str:
    with pytest.raises(PrometheusError) as refused:
        store.query("up")
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_an_instant_query_carries_expression_and_moment_and_gives_typed_samples(answers: Answers, url: str) -> None:
    metric = {"__name__": "up", "instance": "a:1"}
    answers.result("vector", [{"metric": metric, "value": [1.5, "0.25"]}, {"metric": {}, "value": [1.5, "NaN"]}])
    assert PrometheusStore(Endpoint(url)).query('up{a="ü&="}', 12.5) == (Sample({"instance": "a:1"}, 0.25),)
    method, path, given, _ = answers.asked[0]
    assert (method, path) == ("POST", "/api/v1/query")
    assert given == {
        "query": ['up{a="ü&="}'],
        "time": ["12.500"],
        "nocache": ["1"],
        "timeout": ["10000ms"],
    }


def test_without_a_moment_the_store_s_own_now_is_asked_for(answers: Answers, url: str) -> None:
    answers.result("scalar", [7.0, "7"])
    assert PrometheusStore(Endpoint(url)).query("time()") == (Sample({}, 7.0),)
    assert "time" not in answers.asked[0][2]


def test_scrapes_are_points_without_what_is_not_a_number(answers: Answers, url: str) -> None:
    answers.result("matrix", [{"metric": {"rank": "1"}, "values": [[1, "1"], [2, "NaN"], [3, "+Inf"]]}])
    (series,) = PrometheusStore(Endpoint(f"{url}/")).scrapes('x{rank="1"}', 90.0, 3)
    assert (series.labels, series.points) == ({"rank": "1"}, ((1.0, 1.0),))
    assert answers.asked[0][1] == "/api/v1/query"
    assert answers.asked[0][2]["query"] == ['x{rank="1"}[90s]']


@pytest.mark.parametrize("suffix", ["/select/0/prometheus", "/select/0/prometheus/", "/select/0/prometheus/api/v1"])
def test_a_store_may_live_below_a_path(answers: Answers, url: str, suffix: str) -> None:
    PrometheusStore(Endpoint(url + suffix)).query("up")
    assert answers.asked[0][1] == "/select/0/prometheus/api/v1/query"


def test_a_proxy_that_takes_no_post_is_asked_with_get(answers: Answers, url: str) -> None:
    answers.refuse_post = True
    PrometheusStore(Endpoint(url)).query("up")
    assert [(method, given["query"]) for method, _, given, _ in answers.asked] == [("POST", ["up"]), ("GET", ["up"])]


def test_credentials_are_sent_and_never_shown(answers: Answers, url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("pass:word\n")
    endpoint = Endpoint(url, basic_header(f"me:{secret}"))
    PrometheusStore(endpoint).query("up")
    sent = answers.asked[0][3]["authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent) == b"me:pass:word"
    assert bearer_header(secret) == "Bearer pass:word"
    assert sent not in repr(endpoint)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_say_which_option_gives_them(answers: Answers, url: str, status: int) -> None:
    answers.status, answers.body = status, b"no"
    said = refusal(PrometheusStore(Endpoint(url)))
    assert "without credentials" in said
    assert "--bearer-token-file" in said
    assert "the credentials given" in refusal(PrometheusStore(Endpoint(url, "Bearer x")))


@pytest.mark.parametrize(
    "body",
    [
        b"<html>hello</html>",
        b"",
        b"[]",
        b'{"ok":true}',
        b'{"status":"fine","data":1}',
        b"\xff\xfe",
        b"[" * 200_000,
        b"1" * 5000,
    ],
)
def test_what_is_no_prometheus_is_called_so(answers: Answers, url: str, body: bytes) -> None:
    answers.status, answers.body = 404, body
    assert "does not answer as Prometheus does (HTTP 404)" in refusal(PrometheusStore(Endpoint(url)))


def test_an_error_of_the_store_is_passed_on_in_one_line(answers: Answers, url: str) -> None:
    answers.status = 422
    answers.body = (
        b'{"status":"error","errorType":"execution","error":"query\\nprocessing would load too many samples"}'
    )
    assert "query processing would load too many samples" in refusal(PrometheusStore(Endpoint(url)))


@pytest.mark.parametrize("data", [None, 7, {}, {"resultType": "vector"}, {"resultType": "string", "result": [1, "x"]}])
def test_an_answer_of_another_kind_is_an_error(data: object) -> None:
    with pytest.raises(PrometheusError, match="not a Prometheus vector"):
        parse_samples(data, "store")
    with pytest.raises(PrometheusError, match="not a Prometheus matrix"):
        parse_series(data, "store")


def test_redirects_are_not_followed_so_that_credentials_stay(answers: Answers, url: str) -> None:
    answers.status, answers.headers = 302, {"Location": "https://elsewhere.example/login"}
    assert "redirects to https://elsewhere.example/login" in refusal(PrometheusStore(Endpoint(url, "Bearer x")))
    assert len(answers.asked) == 1


def test_nobody_listening_names_the_url() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert f"cannot reach {url}: Connection refused" in refusal(PrometheusStore(Endpoint(url)))


def test_a_store_that_never_answers_times_out() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert "did not answer within 0.2 s" in refusal(PrometheusStore(Endpoint(url, timeout_seconds=0.2)))


def test_all_answers_together_have_a_time_too_and_the_store_is_told_what_is_left(answers: Answers, url: str) -> None:
    store = PrometheusStore(Endpoint(url, timeout_seconds=20.0, all_seconds=15.0))
    store.query("up")
    (given,) = answers.asked[0][2]["timeout"]
    assert 0 < int(given.removesuffix("ms")) <= 15_000
    store = PrometheusStore(Endpoint(url, timeout_seconds=20.0, all_seconds=0.0))
    with pytest.raises(NoAnswerError, match="did not answer everything within 0 s: give it more with --timeout"):
        store.query("up")
    assert len(answers.asked) == 1


@pytest.mark.parametrize(
    ("status", "body", "another_may_be_answered"),
    [
        (503, b'{"status":"error","errorType":"timeout","error":"query timed out"}', True),
        (422, b'{"status":"error","errorType":"execution","error":"too many samples"}', True),
        (504, b"<html>Gateway Time-out</html>", True),
        (400, b'{"status":"error","errorType":"bad_data","error":"parse error"}', False),
        (401, b"", False),
        (404, b"<html>hello</html>", False),
    ],
)
def test_a_busy_store_is_told_from_one_that_cannot_be_asked(
    answers: Answers, url: str, status: int, body: bytes, another_may_be_answered: bool
) -> None:
    answers.status, answers.body = status, body
    with pytest.raises(PrometheusError) as refused:
        PrometheusStore(Endpoint(url)).query("up")
    assert isinstance(refused.value, NoAnswerError) is another_may_be_answered


@pytest.mark.parametrize("at_once", [0, 41], ids=["from the head on", "from the body on"])
def test_a_store_that_drips_times_out_as_one_that_says_nothing(at_once: int) -> None:
    body = b'{"status":"success","data":{"resultType":"vector","result":[]}}'
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    stop = threading.Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(whole[:at_once])
            for letter in whole[at_once:]:
                if stop.wait(0.05):
                    break
                connection.sendall(bytes([letter]))

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        said = refusal(PrometheusStore(Endpoint(url, timeout_seconds=0.4)))
        stop.set()
        thread.join()
    assert "did not answer within 0.4 s" in said


def test_an_answer_of_many_pieces_is_read_whole(answers: Answers, url: str) -> None:
    labels = {"instance": "x" * 100_000}
    answers.result("vector", [{"metric": labels, "value": [1, str(value)]} for value in range(30)])
    assert [one.value for one in PrometheusStore(Endpoint(url)).query("up")] == list(range(30))


def test_partial_answers_and_warnings_are_kept_once_for_the_verdict(answers: Answers, url: str) -> None:
    store = PrometheusStore(Endpoint(url))
    store.query("up")
    assert store.warnings() == ()
    answer = json.loads(answers.body)
    remark = "PromQL info: metric might not be a counter"
    answers.body = json.dumps(answer | {"isPartial": True, "warnings": ["no\nStoreAPI \x1b[31m", remark]}).encode()
    store.query("up")
    store.query("up")
    answers.body = json.dumps(answer | {"isPartial": False, "infos": [remark]}).encode()
    store.query("up")
    partial, warned = store.warnings()
    assert "partial" in partial
    assert warned == f"{url} warns: no StoreAPI \N{REPLACEMENT CHARACTER}[31m"


@pytest.mark.parametrize("warnings", [None, "text", 7, {"a": 1}, [None, 1, ["x"]]])
def test_warnings_of_another_kind_are_none(answers: Answers, url: str, warnings: object) -> None:
    answers.body = json.dumps(json.loads(answers.body) | {"warnings": warnings, "isPartial": "yes"}).encode()
    store = PrometheusStore(Endpoint(url))
    store.query("up")
    assert store.warnings() == ()


def test_what_a_store_writes_commands_no_terminal(answers: Answers, url: str) -> None:
    answers.status, answers.headers = 302, {"Location": "http://evil/\x1b[31m"}
    assert "\x1b" not in refusal(PrometheusStore(Endpoint(url)))
    answers.status, answers.body = 429, b'{"status":"error","error":"too many \\u001b[31m"}'
    assert "\x1b" not in refusal(PrometheusStore(Endpoint(url)))


def test_what_is_not_http_is_told_without_commands_for_the_terminal() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x1b[2J hello\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = refusal(PrometheusStore(Endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}")))
        thread.join()
    assert "cannot reach" in said
    assert "\x1b" not in said


def test_a_plain_url_may_leave_the_scheme_out(server: ThreadingHTTPServer, answers: Answers) -> None:
    PrometheusStore(Endpoint(f"127.0.0.1:{server.server_port}")).query("up")
    assert len(answers.asked) == 1


def test_a_path_and_a_user_may_hold_any_letters(answers: Answers, url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("pässword")
    PrometheusStore(Endpoint(f"{url}/pröm a", basic_header(f"m\udcffe:{secret}"))).query("up")
    _, path, _, headers = answers.asked[0]
    assert path == "/pr%C3%B6m%20a/api/v1/query"
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"m\xffe:" + "pässword".encode()


def test_a_token_with_letters_of_prose_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc\N{EN DASH}def")
    with pytest.raises(PrometheusError, match=r"--bearer-token-file: .*token contains characters that no token has"):
        bearer_header(file)


def test_a_question_that_is_no_text_is_one_line(url: str) -> None:
    with pytest.raises(PrometheusError, match="not a valid label value"):
        PrometheusStore(Endpoint(url)).query("\udcff")


LONG_NAME = f"http://{'a' * 64}:9090"


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:port", "http://[::1", "http://a..b", LONG_NAME, "http://h/\udcff"]
)
def test_what_is_no_url_is_called_so(url: str) -> None:
    with pytest.raises(PrometheusError, match="is not a URL"):
        PrometheusStore(Endpoint(url))


def test_a_password_in_the_url_is_refused() -> None:
    with pytest.raises(PrometheusError, match="--basic-auth"):
        PrometheusStore(Endpoint("http://me:secret@host:9090"))


@pytest.mark.parametrize("text", ["", " \n", "two\nlines"])
def test_a_file_without_one_secret_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "secret"
    file.write_text(text)
    with pytest.raises(PrometheusError, match="one line with the secret"):
        bearer_header(file)


def test_missing_files_are_named_with_their_option(tmp_path: Path) -> None:
    with pytest.raises(PrometheusError, match=r"--bearer-token-file: .*no: No such file"):
        bearer_header(tmp_path / "no")
    with pytest.raises(PrometheusError, match="USER:FILE"):
        basic_header("me")
    with pytest.raises(PrometheusError, match=r"--ca-file: .*no contains no readable certificate"):
        PrometheusStore(Endpoint("https://host", ca_file=tmp_path / "no"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {cert}".split(),
        check=True,
        capture_output=True,
    )
    return cert, key


def test_tls_trusts_the_given_authority_and_no_other(
    server: ThreadingHTTPServer, certificate: tuple[Path, Path]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://127.0.0.1:{server.server_port}"
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the refused handshake
    assert "is not trusted" in refusal(PrometheusStore(Endpoint(url)))
    assert PrometheusStore(Endpoint(url, ca_file=certificate[0])).query("up") == ()
    assert PrometheusStore(Endpoint(url, insecure=True)).query("up") == ()


def test_moments_and_lengths_of_time_as_people_write_them() -> None:
    assert parse_time("1795230300") == parse_time("2026-11-21T03:05:00Z") == parse_time("2026-11-21T03:05:00")
    assert parse_time("2026-11-21T03:05:00+01:00") == parse_time("1795226700")
    assert [parse_duration(text) for text in ("90s", "5m", "1h30m", "250ms", "1.5m")] == [90, 300, 5400, 0.25, 90]


@pytest.mark.parametrize(
    "text", ["", "5", "m", "s", "5x", "-5m", "0s", "5m3", "1..5s", f"{'9' * 400}w", "99999999999w"]
)
def test_what_is_no_length_of_time_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration: write 90s, 5m or 1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "yesterday", "nan", "inf", "1e18", "-1e18", "0001-01-01T00:00:00Z", "1" * 5000])
def test_what_is_no_moment_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_time(text)


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "1e300"])
def test_what_cannot_be_counted_is_no_value(value: str) -> None:
    assert parse_samples({"resultType": "scalar", "result": [1, value]}, "store") == ()
    values = [[1, value], [2, "7"]]
    (series,) = parse_series({"resultType": "matrix", "result": [{"metric": {}, "values": values}]}, "store")
    assert series.points == ((2.0, 7.0),)


@pytest.mark.parametrize("t", ["NaN", "inf", 1e18, -1, 10**400])
def test_a_point_at_no_moment_is_an_error(t: object) -> None:
    with pytest.raises(PrometheusError, match="not a Prometheus matrix"):
        parse_series({"resultType": "matrix", "result": [{"metric": {}, "values": [[t, "7"]]}]}, "store")


def test_a_label_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(PrometheusError, match="not a Prometheus vector"):
        parse_samples({"resultType": "vector", "result": [{"metric": {"a": "\ud800"}, "value": [1, "7"]}]}, "store")


NUMBERS = st.integers() | st.floats() | st.sampled_from(["+Inf", "-Inf", "1e308", 10**400, "1e29"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["resultType", "result", "metric", "value", "values"]), inner, max_size=4)
    ),
)


@given(JSON, st.sampled_from(["vector", "scalar", "matrix"]))
def test_whatever_a_store_answers_it_is_samples_or_one_error(result: object, kind: str) -> None:
    for read in (parse_samples, parse_series):
        with suppress(PrometheusError):
            read({"resultType": kind, "result": result}, "store")


@given(NUMBERS, NUMBERS)
def test_whatever_is_read_can_be_counted_and_dated(t: float | str, value: float | str) -> None:
    found = {"metric": {}, "value": [t, value], "values": [[t, value]]}
    with suppress(PrometheusError):
        for sample in parse_samples({"resultType": "vector", "result": [found]}, "store"):
            int(sample.value)
        for series in parse_series({"resultType": "matrix", "result": [found]}, "store"):
            for moment, one in series.points:
                assert datetime.fromtimestamp(moment, UTC).year >= 1970
                int(one)
