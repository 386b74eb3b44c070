"""Decoding of a bitstream: from its bits to a netlist, which is compared with the routed one, and run.

bits ─► features ─► fabric (wires and pips: what drives each site pin) ─► netlist (BELs and their nets) ─┬─► compare
                                                                                                        └─► C ─► device
"""
