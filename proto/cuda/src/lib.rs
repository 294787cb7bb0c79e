//! The CUDA driver ABI as Tessera sees it: types, the one table of hooked functions
//! ([`for_each_hook!`]), the lists of those that are not hooked, and NVML's part.
//!
//! The table is the single source for the shim's exports and real pointers, for its `dlsym` and
//! `cuGetProcAddress` answers, for the simulated driver's entry checks and for the coverage test.
//! This crate has no dependencies and no code that runs on a hot path.
#![warn(missing_docs)]
#![no_std]

pub mod coverage;
pub mod hooks;
pub mod nvml;
pub mod types;
