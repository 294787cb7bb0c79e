//! The shim's table against NVIDIA's headers and NVIDIA's own libcuda.

mod coverage;
mod real_libcuda;
mod signatures;
