"""Components and kernels through Verilator, driven in bursts by C++."""
