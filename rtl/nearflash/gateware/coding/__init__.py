"""Checksums and linear codes, and nets that synthesis keeps."""
