//! simcuda.
