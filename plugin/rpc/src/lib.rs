//! Serving gRPC on Unix sockets, which kubelet calls.
//!
//! - [`authority`]: accepts requests with a path as `:authority`
//! - `incoming`: accepts connections
#![forbid(unsafe_code)]

pub mod authority;
pub mod incoming;
