//! The shim's table against NVIDIA's headers and NVIDIA's own libcuda.

mod arguments;
mod coverage;
mod real_libcuda;
mod signatures;
