import pytest

from dashboard.control import ControlError, ServiceClient


def test_each_control_asks_its_route(service):
    service.key = "admin"
    client = ServiceClient(service.url + "/", "admin")
    assert client.answers() is True
    assert client.learning()["serving_version"] == 12
    client.pause()
    client.resume()
    assert client.rollback(5) == {"version": 77}
    client.set_preference("cute", ["cute", "classical"], None)
    client.pin(7, True)
    client.pin(7, False)
    assert client.checkpoint() == {"version": 12}
    assert service.told == [
        ("POST", "/v1/learning/pause", None),
        ("POST", "/v1/learning/resume", None),
        ("POST", "/v1/learning/rollback", {"version": 5}),
        ("PUT", "/v1/preference", {"style": "cute", "pool": ["cute", "classical"], "note": None}),
        ("POST", "/v1/learning/pin", {"version": 7}),
        ("POST", "/v1/learning/unpin", {"version": 7}),
        ("POST", "/v1/learning/checkpoint", None),
    ]


def test_a_wrong_key_is_said(service):
    service.key = "admin"
    for key in ("", "other"):
        with pytest.raises(ControlError, match="refused the key"):
            ServiceClient(service.url, key).pause()
    assert service.told == []


def test_the_services_own_words_are_passed_on(service):
    service.refuse = (409, {"error": {"message": "Version 5 has no checkpoint."}})
    with pytest.raises(ControlError, match=r"refused \(409\): Version 5 has no checkpoint"):
        ServiceClient(service.url).rollback(5)


def test_nobody_there(nobody):
    client = ServiceClient(nobody)
    assert client.answers() is False
    with pytest.raises(ControlError, match=r"cannot be reached \(Connection refused\)"):
        client.learning()


@pytest.mark.parametrize("url", ["nonsense", "http://", "ftp://x"])
def test_a_url_that_is_none(url):
    assert ServiceClient(url).answers() is False
    with pytest.raises(ControlError, match="cannot be reached"):
        ServiceClient(url).pause()


@pytest.mark.parametrize("url", ["http://h:80a", "http://[::1", "http://ä..b"])
def test_a_url_that_cannot_be_one(url):
    client = ServiceClient(url)
    assert client.answers() is False
    with pytest.raises(ControlError, match=r"is no address of a service \(.+\)\. Start the dash"):
        client.pause()


@pytest.mark.parametrize("key", ["schlüssel", "a\tb", "a\x00"])
def test_a_key_that_no_request_can_carry(service, key):
    client = ServiceClient(service.url, key)
    assert client.answers() is False
    with pytest.raises(ControlError, match=r"The admin key has characters .+ Enter it again") as e:
        client.pause()
    assert key not in str(e.value)
    assert service.told == []


def test_a_key_is_sent_without_the_spaces_around_it(service):
    service.key = "admin"
    ServiceClient(service.url, " admin\n").pause()
    assert service.told == [("POST", "/v1/learning/pause", None)]


@pytest.mark.parametrize("body", [{}, {"detail": "Not Found"}, {"error": {"message": "Not Found"}}])
def test_a_service_without_the_route_is_older(service, body):
    service.refuse = (404, body)
    with pytest.raises(ControlError, match=r"has no /v1/learning/pin: it is older than this"):
        ServiceClient(service.url).pin(7, True)


def test_what_the_service_does_not_find_it_says(service):
    service.refuse = (404, {"error": {"message": "There is no weight version 7."}})
    with pytest.raises(ControlError, match=r"refused \(404\): There is no weight version 7"):
        ServiceClient(service.url).pin(7, True)
