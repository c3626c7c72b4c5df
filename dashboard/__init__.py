"""Dashboard of a learning endpoint (streamlit, on the store)."""
