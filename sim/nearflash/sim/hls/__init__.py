"""HLS kernels (folder hls/) under g++: their builds, the device `hls`, checks and estimates of users' optimizers."""
