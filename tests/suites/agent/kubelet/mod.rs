//! The gRPC calls between the plugin and kubelet, with a plugin that the test scripts.

mod authority;
mod calls;
mod pod_resources;
