"""The merge of Top-K pairs: proof and vectors."""
