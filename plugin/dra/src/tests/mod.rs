//! The driver as kubelet meets it: sockets, a stand-in kubelet, an API server and a core in memory; once, the agent itself.

mod agent;
mod claims;
mod lifecycle;
mod quota;
mod storms;
mod support;
