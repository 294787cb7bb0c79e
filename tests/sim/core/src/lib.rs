//! simgpu.
