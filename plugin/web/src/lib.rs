//! The JSON API and the page over HTTP, for a node's plugin and for `tessera console` alike.
//!
//! **For**: `/api/v1`, its authorisation (TokenReview and SubjectAccessReview, or loopback alone), its events, and
//! the page's files. What is shown comes from a [`Source`]; who may see what is decided here and nowhere else.
//!
//! **May use**: the view, the cluster. **Must not**: know the agent or kubelet.
//!
//! - [`server`]: listeners and their thread, for metrics and probes too
//! - `routes`: which path is which question, and the page's files; `answers`: what it answers; `stream`: events
//! - [`authorise`], `caller`: which tenants a caller may see
//! - [`counts`]: what was asked and answered, for metrics
//! - [`client`]: asks such a server
#![forbid(unsafe_code)]

mod answers;
pub mod authorise;
mod caller;
pub mod client;
pub mod counts;
pub mod fixtures;
mod query;
mod routes;
pub mod server;
pub mod source;
mod stream;
mod tls;

pub use authorise::Authorisation;
pub use caller::Peer;
pub use counts::Counts;
pub use routes::{Route, SCHEMA};
pub use server::{Listener, Options, Report, RootSocket, Server};
pub use source::{Refusal, Source};
pub use tessera_view::SourceError;
pub use tls::{SelfSigned, Tls, self_signed};
