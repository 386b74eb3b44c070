"""Vendor scripts without vendor tools: run under tclsh with stubs that record, and checked against the design."""
