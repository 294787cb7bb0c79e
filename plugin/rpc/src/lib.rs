//! Serving gRPC on Unix sockets: what kubelet's sockets and the admin socket have in common.
//!
//! - [`authority`]: accepts requests with a path as `:authority`, and knows which are open
//! - `incoming`: accepts connections, bounded, and gives up those that ask nothing
#![forbid(unsafe_code)]

pub mod authority;
pub mod incoming;
