//! CUDA and NVML clients that nobody here wrote.

mod cudarc;
mod python;
