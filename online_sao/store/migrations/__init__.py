"""Revisions of the store's schema, run by online_sao.store.migration."""
