"""Dashboard of a learning endpoint: the frame around its pages.

    streamlit run dashboard/app.py -- --store sqlite:///path/store.sqlite --url http://127.0.0.1:8000

Figures come from the store (dashboard/queries.py, read-only), so they are there when the
service is down; the controls go to the service by HTTP (dashboard/control.py). Pages are
layout only, one per file (dashboard/*_page.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import streamlit as st

from dashboard import (
    controls_page,
    health_page,
    live_page,
    rollouts_page,
    runs_page,
    versions_page,
)
from dashboard.parts import escape, open_reader, viewer_zone
from dashboard.queries import StoreReader
from online_sao.config import Config
from online_sao.errors import StoreError

Show = Callable[[StoreReader, argparse.Namespace], None]

REFRESH_S = 3
PAGES: dict[str, tuple[Show, bool]] = {  # and whether it refreshes itself
    "Live": (live_page.show, True),
    "Learning health": (health_page.show, True),
    "Rollouts": (rollouts_page.show, False),  # a table that changes under the hand is unreadable
    "Versions": (versions_page.show, False),
    "Controls": (controls_page.show, False),
}
RUNS = "Runs"  # reads result folders instead of the store
# Streamlit greys out what is being refreshed, which flickers every few seconds. Its captions,
# chart texts, chosen values, links, small print of tiles and primary buttons have too little
# contrast in one theme or the other. Labels of tiles are cut off where they could wrap.
STYLE = """<style>
[data-stale="true"] { opacity: 1 !important; transition: none !important; }
[data-testid="stMetricValue"] { font-size: 1.5rem; }
[data-testid="stMetricLabel"] * { white-space: normal !important; }
[data-testid="stMetricDelta"] {
  color: inherit !important; background: none !important; padding: 0 !important; opacity: 0.88; }
@media (max-width: 640px) {
  [data-testid="stMetricValue"] { font-size: 1.2rem; }
}
.stMainBlockContainer [data-testid="stMarkdownContainer"] a {
  color: inherit !important; text-decoration: underline !important; }
.stMainBlockContainer { padding-top: 2.5rem; padding-bottom: 3rem; }
.stMainBlockContainer h1 { font-size: 1.6rem; padding: 0 0 0.4rem; }
.stMainBlockContainer h2 { font-size: 1.2rem; padding: 0.6rem 0 0.5rem; }
[data-testid="stCaptionContainer"], [data-testid="stCaptionContainer"] p {
  color: inherit; opacity: 0.88; }
[data-testid="stVegaLiteChart"] svg text { fill: currentColor !important; }
[data-tag] { background: #6D5BD0 !important; }
button[kind="primary"] { background: #6D5BD0; border-color: #6D5BD0; color: white; }
</style>"""


def main() -> None:
    st.set_page_config(page_title="online_sao", layout="wide")
    options = _options()
    st.html(STYLE)
    with st.container(
        horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"
    ):
        st.markdown("# online_sao", width="content")
        st.caption(f"Times in {viewer_zone()}", width="content")
        live = st.toggle(f"Refresh every {REFRESH_S} s", value=True, key="live", width="content")
    page = st.segmented_control(
        "Page",
        [*list(PAGES)[:-1], RUNS, list(PAGES)[-1]],
        default=next(iter(PAGES)),
        required=True,
        key="page",
        bind="query-params",
        label_visibility="collapsed",
    )
    if page == RUNS:
        runs_page.show(options)
        return
    try:
        reader = open_reader(options.store)
        if not reader.is_there():
            _wait_for_store(reader)
            return
        show, refreshes = PAGES[page]
        every = REFRESH_S if live and refreshes else None
        st.fragment(_guarded, run_every=every)(show, reader, options)
    except StoreError as error:
        st.error(escape(error), icon=":material/database_off:")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="streamlit run dashboard/app.py --", allow_abbrev=False)
    parser.add_argument("--store", default=os.environ.get("ONLINE_SAO_STORE_URL"))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the service")
    parser.add_argument("--runs", default="runs", help="folder of simulations' results")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder")
    options = parser.parse_known_args(sys.argv[1:])[0]
    options.store = options.store or Config().store_url
    return options


def _guarded(show: Show, reader: StoreReader, options: argparse.Namespace) -> None:
    """A page; a store that fails in the middle is one sentence, and tried again."""
    try:
        show(reader, options)
    except StoreError as error:
        st.error(escape(error), icon=":material/database_off:")


def _wait_for_store(reader: StoreReader) -> None:
    st.info(
        f"There is no store at {escape(reader.place)} yet. It is made when the service starts for "
        "the first time (make serve). This page opens by itself then.",
        icon=":material/hourglass_empty:",
    )

    @st.fragment(run_every=REFRESH_S)
    def look() -> None:
        if reader.is_there():
            st.rerun()

    look()


if __name__ == "__main__":
    main()
