"""What several pages draw with."""

from __future__ import annotations

import re
from datetime import UTC, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import pandas as pd
import streamlit as st

from dashboard.queries import StoreReader

NOTHING = "–"  # in a table where there is no number
WORD_JOINER = "\u2060"  # has no width
RANGES = {"last 200": 200, "last 1,000": 1000, "last 10,000": 10_000, "all": None}

_PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")
# Streamlit looks for bare addresses and icons when the backslashes are already gone.
_READ_LATER = re.compile(r":(?=//|[\w+-]+:)|@(?=[\w-])|www(?=\.)", re.IGNORECASE)


def escape(text: object) -> str:
    """One line of markdown that shows `text` and is nothing else: no image, link or icon.

    For all that a client, a judge, an operator or a file may have written, wherever streamlit
    reads markdown: also in titles and values of tiles, warnings and help texts.
    """
    flat = " ".join(str(text).split())
    parted = _READ_LATER.sub(lambda found: found[0] + WORD_JOINER, flat)
    return _PUNCTUATION.sub(r"\\\g<0>", parted)


@st.cache_resource
def open_reader(url: str) -> StoreReader:
    """One for all viewers of a store."""
    return StoreReader(url)


def choose_range(what: str, key: str) -> int | None:
    chosen = st.segmented_control(
        f"Range ({what})",
        list(RANGES),
        default="last 1,000",
        required=True,
        key=key,
        label_visibility="collapsed",
    )
    return RANGES[chosen or "last 1,000"]


def tile(label: str, value: str, help: str | None = None, note: str | None = None) -> None:
    """`note`: in small print under the value."""
    st.metric(
        label,
        value,
        delta=note,
        delta_color="off",
        delta_arrow="off",
        help=help,
        border=True,
        height="stretch",
    )


def draw(chart: Any, alt: str) -> None:
    st.altair_chart(chart, width="stretch", alt=alt)


def csv_button(table: pd.DataFrame, name: str) -> None:
    st.download_button(
        "CSV",
        inert(table).to_csv(index=False).encode(),
        file_name=f"online_sao_{name}.csv",
        mime="text/csv",
        key=f"csv_{name}",
        icon=":material/download:",
        on_click="ignore",
        help="Download this table.",
    )


def inert(table: pd.DataFrame) -> pd.DataFrame:
    """`table` without a text that a spreadsheet takes for a formula: some come from clients."""

    def quoted(cell: Any) -> Any:
        is_formula = isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{cell}" if is_formula else cell

    def has_texts(column: pd.Series) -> bool:
        return pd.api.types.is_object_dtype(column) or pd.api.types.is_string_dtype(column)

    return table.apply(lambda column: column.map(quoted) if has_texts(column) else column)


def shown_number(value: float | int | None, form: str) -> str:
    return "none yet" if value is None or value != value else format(value, form)


def viewer_zone() -> tzinfo:
    """The viewer's time zone, as the browser says."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (KeyError, ValueError, OSError):
        return UTC


def local_times(times: pd.Series, zone: tzinfo) -> pd.Series:
    """Times as the viewer's clock shows them, without a zone (streamlit would convert again)."""
    return pd.to_datetime(times, utc=True).dt.tz_convert(zone).dt.tz_localize(None)
