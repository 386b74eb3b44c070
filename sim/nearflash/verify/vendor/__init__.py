"""Vendor scripts without the vendor's tools: run under tclsh with stubs that record, then checked against the design."""
