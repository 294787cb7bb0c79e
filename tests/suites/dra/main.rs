//! The plugin as it is shipped with its DRA driver on, beside the stand-ins for kubelet and the API server, and
//! tenants under the shim that see and keep the quota of their claims' shares.

mod moving;
mod node;
mod shares;
mod trouble;
