import pytest

from dashboard.control import ControlError, ServiceClient


def test_each_control_asks_its_route(service):
    service.key = "admin"
    client = ServiceClient(service.url + "/", "admin")
    assert client.answers() is True
    assert client.learning()["version"] == 12
    client.pause()
    client.resume()
    assert client.rollback(5) == {"version": 77}
    client.set_preference("cute", ["cute", "classical"], None)
    assert service.told == [
        ("POST", "/v1/learning/pause", None),
        ("POST", "/v1/learning/resume", None),
        ("POST", "/v1/learning/rollback", {"version": 5}),
        ("PUT", "/v1/preference", {"style": "cute", "pool": ["cute", "classical"], "note": None}),
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
