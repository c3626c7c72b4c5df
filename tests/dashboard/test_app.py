"""Every page in every state, by streamlit's own test harness."""

import re
import sqlite3
import sys
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from online_sao.errors import StoreError
from online_sao.types import Preference, RolloutState, StoredVerdict, WeightSpan

APP = Path(__file__).parents[2] / "dashboard" / "app.py"
PAGES = ["Live", "Learning health", "Rollouts", "Versions", "Controls"]


@pytest.fixture
def open_page(monkeypatch, nobody):
    """Opens a page on a store as a browser would, and checks that nothing was thrown."""

    def opened(page, store, url=nobody, *options, **query):
        arguments = ["app.py", "--store", store, "--url", url, *map(str, options)]
        monkeypatch.setattr(sys, "argv", arguments)
        test = AppTest.from_file(str(APP), default_timeout=60)
        test.query_params["page"] = page
        for name, value in query.items():
            test.query_params[name] = str(value)
        return ran(test.run())

    return opened


def ran(test):
    assert not test.exception, test.exception
    return test


READ_AS_MARKDOWN = ("markdown", "caption", "info", "success", "warning", "error")


def words(test):
    """All text on the page."""
    kinds = (*READ_AS_MARKDOWN, "text", "html")
    return "\n".join(shown(element) for kind in kinds for element in getattr(test, kind))


def shown(element):
    """What a reader sees: without what keeps the text from being read as markdown."""
    return re.sub(r"\\([!-/:-@\[-`{-~])|\u2060", r"\1", str(element.value))


def charts_on(test):
    return len(test.get("vega_lite_chart"))


def button(test, label):
    return next(b for b in test.button if b.label == label)


def choice(test, label):
    return next(box for box in test.selectbox if box.label == label)


# ---- states of the store


@pytest.mark.parametrize("page", PAGES)
def test_no_store_yet(open_page, tmp_path, page):
    test = open_page(page, f"sqlite:///{tmp_path}/store.sqlite")
    assert "There is no store at" in shown(test.info[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("Live", "No answer has been recorded yet"),
        ("Learning health", "No update has been made yet"),
        ("Rollouts", "No answer has been recorded yet"),
        ("Versions", "There is no weight version yet"),
        ("Controls", "No checkpoint is kept yet"),
    ],
)
def test_an_empty_store(open_page, small, page, said):
    test = open_page(page, small.url)
    assert said in words(test)
    assert charts_on(test) == 0


@pytest.mark.parametrize(
    ("page", "charts", "tables"),
    [
        ("Live", 3, 1),
        ("Learning health", 17, 1),
        ("Rollouts", 1, 2),
        ("Versions", 0, 3),
        ("Controls", 0, 0),
    ],
)
def test_a_full_store(open_page, shift_url, page, charts, tables):
    test = open_page(page, shift_url)
    assert (charts_on(test), len(test.dataframe)) == (charts, tables)
    assert not test.error


@pytest.mark.parametrize("page", PAGES)
def test_a_store_that_is_no_database(open_page, tmp_path, page):
    path = tmp_path / "notes.txt"
    path.write_text("only notes " * 1000)
    test = open_page(page, f"sqlite:///{path}")
    assert "is not an SQLite database" in shown(test.error[0])


@pytest.fixture
def locked(small, monkeypatch):
    """A store whose file another process keeps for itself."""
    monkeypatch.setattr("online_sao.store.database.BUSY_TIMEOUT_S", 0.2)
    small.begin()
    small.store.close()
    with sqlite3.connect(small.url.removeprefix("sqlite:///"), isolation_level=None) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        yield small.url
        other.execute("ROLLBACK")
    other.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_locked_store_is_said(open_page, locked, page):
    (error,) = open_page(page, locked).error
    assert "is locked by another process for too long" in shown(error)


@pytest.mark.parametrize("page", PAGES)
def test_a_writer_at_work_does_not_hold_the_pages_up(open_page, small, service, page):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 1, 0.5, **{"policy/entropy": 0.4})
    path = small.url.removeprefix("sqlite:///")
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM rollouts")  # never committed, so never seen
        test = open_page(page, small.url, service.url)
        writer.execute("ROLLBACK")
    writer.close()
    assert not test.error
    assert "No answer has been recorded yet" not in words(test)


@pytest.mark.parametrize("page", ["Learning health", "Rollouts", "Versions"])
def test_pages_that_only_read_do_not_miss_the_service(open_page, shift_url, page):
    test = open_page(page, shift_url)
    assert not test.warning
    assert not test.error


def test_a_store_that_fails_in_the_middle(open_page, small, monkeypatch):
    def fail(*_, **__):
        raise StoreError("The store is locked.")

    monkeypatch.setattr("dashboard.queries.StoreReader.situation", fail)
    assert [shown(e) for e in open_page("Live", small.url).error] == ["The store is locked."]


def test_a_url_that_is_none(open_page):
    assert "is not a database URL" in open_page("Live", "store.sqlite").error[0].value


def test_the_page_follows_a_store_that_is_being_written(open_page, small, service):
    small.begin()
    small.add("a")
    test = open_page("Live", small.url, service.url)
    assert "no answer has been judged since then" in words(test)
    assert "None of these answers has been judged yet" in words(test)
    assert charts_on(test) == 0
    small.add("b", seen="cute")
    ran(test.run())
    assert "Adapting to Cute" in words(test)
    assert charts_on(test) == 2  # no values before the first update
    small.store.set_preference(Preference("classical", ("cute", "classical")), 0)
    small.add("c", seen="cute", reward=0.0)
    ran(test.run())
    assert "Adapting to Classical" in words(test)
    assert "no reward yet in 1 answer; a switch usually takes some dozens" in words(test)
    assert "Adapting to Classical" in shown(test.info[0])  # no good news
    assert "Reward, 1 answer since" in [tile.label for tile in test.metric]


# ---- what others wrote

NASTY = "![x](http://evil.example/x.png) www.evil.example"


def read_as_markdown(test):
    """Everything on the page that streamlit reads as markdown."""
    found = [element.value for kind in READ_AS_MARKDOWN for element in getattr(test, kind)]
    for tile in test.metric:
        found += [tile.label, tile.value, tile.delta, tile.proto.help]
    found += [box.label for box in test.expander]
    return [str(text) for text in found]


@pytest.fixture
def nasty_store(small):
    """Wherever a client, a judge or an operator may write what he likes, he did."""
    epoch = small.begin()
    small.store.set_preference(Preference(NASTY, (NASTY, "cute"), NASTY), 0)
    asked = [{"role": NASTY, "content": NASTY}]
    fields = {"messages": asked, "answer": NASTY, "session_id": NASTY, "finish_reason": NASTY}
    small.add("a", seen=NASTY, **fields)
    small.train(epoch, 1, 0.5, **{"policy/entropy": 0.4})
    small.add("b", seen=NASTY, weight_spans=(WeightSpan(1, 0, 3),), **fields)
    small.train(epoch, 2, 0.5, **{"policy/entropy": 0.4})
    small.add("c", state=RolloutState.EXCLUDED, reason=NASTY, **fields)
    verdict = StoredVerdict(None, None, 1.0, rationale=NASTY, model=NASTY, source=NASTY, raw=NASTY)
    small.store.set_verdict("c", verdict)
    small.store.add_event("error", {"what": NASTY})
    small.store.add_event("pause", {"reason": NASTY})
    return small.url


@pytest.mark.parametrize(
    ("page", "query", "times"),
    [
        ("Live", {}, 3),  # the pause, the warning, the preferred style
        ("Learning health", {}, 0),
        ("Rollouts", {"rollout": 1}, 6),  # role, question, answer, three facts
        ("Rollouts", {"rollout": 3}, 9),  # and the reason, who judged, what for
        ("Versions", {}, 5),  # a question, two answers and their styles
        ("Controls", {}, 1),  # the pause
    ],
)
def test_nothing_that_others_wrote_is_read_as_markdown(
    open_page, nasty_store, service, page, query, times
):
    service.paused, service.reason = True, NASTY
    test = open_page(page, nasty_store, service.url, **query)
    for text in read_as_markdown(test):
        assert "![x](" not in text
        assert "http://evil" not in text
        assert "www.evil" not in text
    seen = "\n".join([words(test), *map(shown, test.metric)])
    assert seen.count(NASTY) >= times


def test_nor_is_it_in_a_question_or_an_answer_of_the_service(open_page, nasty_store, service):
    service.refuse = (409, {"error": {"message": NASTY}})
    test = open_page("Controls", nasty_store, service.url)
    button(test, "Switch the preference").click()
    ran(test.run())
    assert f"Reward {NASTY} (of " in words(test)
    assert not any("![x](" in text for text in read_as_markdown(test))
    button(test, "Yes").click()
    ran(test.run())
    assert f"refused (409): {NASTY}" in shown(test.error[0])
    assert not any("![x](" in text for text in read_as_markdown(test))


def test_a_session_is_copied_as_it_was_recorded(open_page, small):
    small.begin()
    small.add("a", session_id="me@home.example:http://x_y")
    facts = [text.value for text in open_page("Rollouts", small.url).text]
    assert any("session me@home.example:http://x_y\n" in text for text in facts)


# ---- live


def test_the_live_page_tells_the_operator_what_is_going_on(open_page, shift_url, service):
    test = open_page("Live", shift_url, service.url)
    assert shown(test.success[0]).startswith("**Settled on Classical after ")
    tiles = {metric.label: metric.value for metric in test.metric}
    (preferred,) = [label for label in tiles if label.startswith("Preferred since ")]
    assert tiles[preferred] == "Classical"
    assert tiles["Learning machinery"] == "healthy"
    (note,) = [tile.delta for tile in test.metric if tile.label == preferred]
    assert note.endswith(" minutes ago")
    assert len(tiles) == 10  # two rows of five, five rows of two on a phone
    assert float(tiles["Quality, last 40"].removesuffix("%")) > 80
    assert float(tiles["In style, last 40"].removesuffix("%")) > 80
    assert float(tiles["Reward, last 40"]) > 0.8
    assert tiles["Waiting"] == "3 + 0"
    assert tiles["Service"] == "up"
    assert '"domain": [1, 451]' in test.get("vega_lite_chart")[0].proto.spec
    test.button_group(key="live_range").set_value("last 200")
    ran(test.run())
    assert '"domain": [251, 451]' in test.get("vega_lite_chart")[0].proto.spec


def test_a_service_that_is_down_is_said(open_page, shift_url):
    test = open_page("Live", shift_url)
    assert "The service does not answer" in shown(test.warning[0])
    assert charts_on(test) == 3


def test_a_url_that_cannot_be_one_is_said_and_no_service_is_called_down(open_page, small):
    small.begin()
    for page in PAGES:
        test = open_page(page, small.url, "http://h:80a")
        if page in ("Live", "Controls"):  # the others do not ask the service
            said = "http://h:80a is no address of a service (Invalid port: '80a')"
            assert said in shown(test.warning[0]), page
            assert "does not answer" not in words(test)
    live = open_page("Live", small.url, "http://h:80a")
    assert {tile.label: tile.value for tile in live.metric}["Service"] == "unknown"


def test_a_pause_and_a_warning_stand_on_top(open_page, small, service):
    small.begin()
    small.add("a", seen="cute")
    small.store.add_event("error", {"what": "The disk is full."})
    small.store.add_event("pause", {"reason": "guard: entropy"})
    (box,) = open_page("Live", small.url, service.url).warning
    assert "Learning is paused since" in shown(box)
    assert "(guard: entropy)" in shown(box)
    assert "Last warning: The disk is full." in shown(box)


def test_a_figure_beyond_its_bound_stands_on_top_with_what_to_do(open_page, small, service):
    epoch = small.begin()
    for number in range(20):
        small.add(f"a{number}", seen="cute")
        small.train(epoch, number + 1, 0.5, **{"policy/entropy": 0.001, "policy/kl_to_start": 0.1})
    test = open_page("Live", small.url, service.url)
    assert "Entropy is 0.001 nats per token (at least 0.02 is well)" in shown(test.warning[0])
    assert {m.label: m.value for m in test.metric}["Learning machinery"] == "needs a look"
    (line,) = test.expander
    assert "1 of 2 figures inside their bounds, 5 not measured" in line.label
    assert line.proto.expanded
    assert "[Controls](?page=Controls)" in words(test)
    table = test.dataframe[0].value
    now = dict(zip(table["figure"], table["now"], strict=True))
    assert (now["KL to the start policy"], now["Entropy"]) == ("well", "beyond")
    assert now["Answer length"] == "not measured: these updates did not record it"
    said = words(open_page("Learning health", small.url))
    assert "**Entropy**: 0.001 nats per token :material/warning: beyond its bound" in said
    assert "Well is at least 0.02 (the dashboard's bound)." in said


def test_a_reward_that_stays_low_is_no_fault_of_the_machinery(open_page, small, service):
    epoch = small.begin()
    for number in range(150):
        small.add(f"a{number}", seen="classical", reward=0.0)
        if number < 20:
            small.train(epoch, number + 1, 0.5, **{"policy/entropy": 0.4})
    test = open_page("Live", small.url, service.url)
    assert "After 150 answers the reward is still low" in shown(test.warning[0])
    tiles = {metric.label: metric.value for metric in test.metric}
    assert tiles["Learning machinery"] == "healthy"
    assert (tiles["Reward, last 40"], tiles["Quality, last 40"]) == ("0.00", "100%")
    assert test.expander[0].proto.expanded  # what to do


# ---- learning health


def test_each_metric_is_explained_where_it_is_shown(open_page, shift_url):
    test = open_page("Learning health", shift_url)
    said = words(test)
    assert "**KL to the start policy**" in said
    assert "nothing is learned any more" in said
    table = test.dataframe[0].value
    assert ["unscored", "timeout"] in table[["state", "reason"]].to_numpy().tolist()


def test_metrics_without_a_critic(open_page, small):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(
        epoch, 1, 0.5, **{"critic/value_first": None, "policy/entropy": 0.4, "other/thing": 1.0}
    )
    test = open_page("Learning health", small.url)
    assert charts_on(test) == 1
    assert "**Entropy**: 0.4" in words(test)
    assert "V at the first token" not in words(test)


def test_held_out_rounds_are_drawn_where_there_are_some(open_page, small):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 1, 0.5, **{"policy/entropy": 0.4})
    assert "questions it never learns from" not in words(open_page("Learning health", small.url))
    for version, quality in ((0, None), (1, 0.75), (2, 0.25)):
        small.store.add_event(
            "probe", {"version": version, "quality": quality, "reward": 0.5, "num_answers": 8}
        )
    test = open_page("Learning health", small.url)
    assert "questions it never learns from" in words(test)
    assert "(8 in the newest)" in words(test)
    assert charts_on(test) == 2


# ---- rollouts


def test_one_opened_shows_question_answer_verdict_and_tokens(open_page, shift_url):
    folder = Path(shift_url.removeprefix("sqlite:///")).parent
    test = open_page("Rollouts", shift_url, "http://x", "--tokenizer", folder, rollout=421)
    said = words(test)
    assert "Rollout 421 (" in said
    assert "Write a few lines about" in said
    assert "**Reward " in said
    assert "Reads as" in said
    assert "outside the trust region and taught nothing" in said
    assert 'title="advantage' in said
    test.button_group(key="shade").set_value("importance ratio")
    ran(test.run())
    assert 'title="importance ratio 1.' in words(test)


def test_without_a_tokenizer_tokens_are_numbers_and_masks_are_the_runs(open_page, small):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 1, 0.25)
    small.store.add_feedback("a", 0.0, "no")
    test = open_page("Rollouts", small.url)
    assert "No tokenizer.json was found" in words(test)
    tokens = test.dataframe[-1].value
    assert tokens["token_id"].tolist() == [7, 8, 9]
    assert tokens["masked"].tolist() == [False, True, True]  # 0.7 and 6 are not inside (0.7, 6)
    assert "no" in test.dataframe[1].value["comment"].tolist()


def test_deleted_and_unjudged_answers(open_page, small):
    small.begin()
    small.add("gone", seen="cute")
    small.store.delete_text("gone")
    small.add("open")
    assert "waits for its verdict" in words(open_page("Rollouts", small.url))
    said = words(open_page("Rollouts", small.url, rollout=1))
    assert "(deleted)" in said
    assert "Its tokens were deleted" in said
    assert "(discarded: deleted)" in said


def test_a_rollout_that_does_not_exist(open_page, small):
    small.begin()
    small.add("a")
    test = open_page("Rollouts", small.url, rollout=99)
    assert shown(test.warning[0]) == "There is no rollout 99."


def test_filters_and_paging(open_page, shift_url):
    test = open_page("Rollouts", shift_url)
    assert test.dataframe[0].value["rollout"].tolist() == list(range(450, 400, -1))
    button(test, "Older").click()
    ran(test.run())
    assert test.dataframe[0].value["rollout"].tolist() == list(range(400, 350, -1))
    choice(test, "State").set_value("unscored")
    ran(test.run())
    shown = test.dataframe[0].value
    assert set(shown["state"]) == {"unscored: timeout"}
    assert shown["rollout"].is_monotonic_decreasing
    choice(test, "Reward").set_value("1")  # unscored, and yet a reward of 1
    ran(test.run())
    assert "No answer passes these filters" in words(test)


# ---- versions


def test_events_versions_and_a_comparison(open_page, shift_url):
    test = open_page("Versions", shift_url)
    events, versions, compared = (table.value for table in test.dataframe)
    assert events["what"].tolist()[-1] == "preference"
    assert "style: cute; pool: academic, cute, chuunibyou" in events["details"].tolist()[-1]
    assert versions["version"].tolist()[0] == max(versions["version"])
    assert versions["checkpoint"].tolist()[0]
    assert "policy/entropy" in compared["metric"].tolist()
    assert "questions that clients asked of both" in words(test)
    assert "Write a few lines about" in words(test)


# ---- controls


@pytest.fixture
def controls(open_page, small, service):
    small.begin()
    small.add("a", state=RolloutState.EXCLUDED, reason="opted_out")
    small.store.set_checkpoint(0, "/checkpoints/v0")
    return open_page("Controls", small.url, service.url)


@pytest.mark.parametrize(
    ("label", "told", "said"),
    [
        ("Pause learning", ("POST", "/v1/learning/pause", None), "Learning is paused since"),
        ("Resume learning", ("POST", "/v1/learning/resume", None), "Learning goes on since"),
        (
            "Pin",
            ("POST", "/v1/learning/pin", {"version": 0}),
            "Version 0 is pinned since",
        ),
        (
            "Checkpoint now",
            ("POST", "/v1/learning/checkpoint", None),
            "Version 12 has a checkpoint since",
        ),
        (
            "Roll back",
            ("POST", "/v1/learning/rollback", {"version": 0}),
            "The weights of version 0 serve again as version 77 since",
        ),
    ],
)
def test_each_control_asks_once_and_says_what_happened(controls, service, label, told, said):
    button(controls, label).click()
    ran(controls.run())
    assert service.told == []
    button(controls, "Yes").click()
    ran(controls.run())
    assert service.told == [told]
    assert said in shown(controls.success[0])
    assert "Yes" not in [b.label for b in controls.button]
    ran(controls.run())
    assert service.told == [told]


def test_a_switch_of_the_preference(controls, service):
    controls.selectbox(key="style").set_value("classical")
    controls.text_input(key="note").set_value("try it")
    button(controls, "Switch the preference").click()
    ran(controls.run())
    assert "Reward Classical (of Cute, Classical) from now on?" in words(controls)
    button(controls, "Yes").click()
    ran(controls.run())
    body = {"style": "classical", "pool": ["cute", "classical"], "note": "try it"}
    assert service.told == [("PUT", "/v1/preference", body)]
    assert "Classical is preferred since" in shown(controls.success[0])


def test_a_style_outside_the_pool_is_not_sent(controls, service):
    controls.multiselect(key="pool").set_value(["cute"])
    controls.selectbox(key="style").set_value("classical")
    button(controls, "Switch the preference").click()
    ran(controls.run())
    assert "must be one of those the judge tells apart" in shown(controls.error[0])
    assert service.told == []


def test_cancel_changes_nothing(controls, service):
    button(controls, "Pause learning").click()
    ran(controls.run())
    button(controls, "Cancel").click()
    ran(controls.run())
    assert service.told == []
    assert shown(controls.success[0]) == "Nothing was changed."


def test_a_refusal_is_shown_in_the_services_words(controls, service):
    service.refuse = (409, {"error": {"message": "Version 0 has no retained checkpoint."}})
    button(controls, "Roll back").click()
    ran(controls.run())
    button(controls, "Yes").click()
    ran(controls.run())
    assert "Version 0 has no retained checkpoint." in shown(controls.error[0])


def test_a_service_that_cannot_pin_is_said(controls, service):
    service.refuse = (404, {"error": {"message": "Not Found"}})
    button(controls, "Pin").click()
    ran(controls.run())
    button(controls, "Yes").click()
    ran(controls.run())
    assert "it is older than this dashboard" in shown(controls.error[0])


def test_what_is_pinned_can_be_unpinned(open_page, small, service):
    small.begin()
    small.store.set_checkpoint(0, "/checkpoints/v0")
    small.store.pin(0)
    test = open_page("Controls", small.url, service.url)
    assert button(test, "Pin").disabled
    assert "pinned" in choice(test, "Version to keep").options[0]
    button(test, "Unpin").click()
    ran(test.run())
    button(test, "Yes").click()
    ran(test.run())
    assert service.told == [("POST", "/v1/learning/unpin", {"version": 0})]
    assert "Version 0 is no longer pinned since" in shown(test.success[0])


def test_versions_to_go_back_to_say_when_they_were_made(open_page, small, service):
    small.begin("cute")
    small.store.set_checkpoint(0, "/checkpoints/v0")
    small.store.set_preference(Preference("classical", ("cute", "classical")), 0)
    test = open_page("Controls", small.url, service.url)
    (label,) = choice(test, "To version").options
    assert label.startswith("0 · ")
    assert label.endswith(" · before Classical")


def test_the_version_that_serves_is_none_to_go_back_to(open_page, small, service):
    epoch = small.begin()
    small.add("a", seen="cute")
    small.train(epoch, 12, 0.5)  # what the service says it serves
    small.store.set_checkpoint(12, "/checkpoints/v12")
    test = open_page("Controls", small.url, service.url)
    assert "The only checkpoint is of the version that serves." in words(test)


def test_the_key_is_asked_for_and_used(controls, service):
    service.key = "admin"
    ran(controls.run())
    assert "refused the key" in shown(controls.warning[0])
    assert button(controls, "Pause learning").disabled
    controls.text_input(key="admin_key").set_value("admin")
    ran(controls.run())
    assert not controls.warning
    assert "**Now:** learning is on, version 12 serves." in words(controls)


def test_a_key_that_no_request_can_carry_is_said(controls, service):
    controls.text_input(key="admin_key").set_value("schlüssel")
    ran(controls.run())
    assert "The admin key has characters that no request can carry" in shown(controls.warning[0])
    assert button(controls, "Pause learning").disabled
    assert service.told == []


def test_controls_are_off_while_the_service_is_down(open_page, shift_url):
    test = open_page("Controls", shift_url)
    assert "cannot be reached" in shown(test.warning[0])
    assert all(b.disabled for b in test.button)
