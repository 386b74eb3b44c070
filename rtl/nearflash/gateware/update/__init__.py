"""The optimizer update: AXPBY units, lanes, and the pipeline that puts streams around them."""
