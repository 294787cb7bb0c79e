//! The Kubernetes API, through `kube`: DRA's objects ([`resource`]), events on pods ([`events`]), the labels of a node
//! ([`node`]), users of tokens and their rights ([`reviews`]), and what a person asks with a kubeconfig ([`user`]).
//!
//! It knows Kubernetes' objects and nothing of GPUs, shares or the agent. It may use `system` and what is below,
//! and is the only crate that speaks to an API server. Nothing here keeps objects of others: a claim is read when
//! it is needed, and the watch of the driver's own slices passes on names alone.
#![forbid(unsafe_code)]

mod access;
mod client;
pub mod error;
pub mod events;
pub mod fixtures;
pub mod node;
pub mod resource;
pub mod reviews;
pub mod user;

pub use access::{Access, Server};
pub use client::Client;
pub use error::{ApiError, Call, Failure, Kind, Retry, Verb};
/// The field's own types, of which this crate's interface is made: users need no version of their own.
pub use k8s_openapi;
