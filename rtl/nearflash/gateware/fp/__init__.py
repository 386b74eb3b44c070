"""IEEE 754 binary32 arithmetic: unpack -> raw -> operate -> one rounder -> pack."""
