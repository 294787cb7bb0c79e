//! The arbiter's state, for `status` and the demo.

use super::gate_connections::ProtocolViolations;
use super::latency::TurnHistogram;
use super::policy::{GateState, IdleTotals, Share, TenantTotals};
use std::collections::BTreeMap;

/// One GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuShare {
    /// Its UUID.
    pub uuid: String,
    /// The allocation that holds its lease, or still drains it.
    pub holder: Option<String>,
    /// Allocations that drain too late and use the GPU beside the holder.
    pub late: Vec<String>,
    /// Allocations that wait for it.
    pub waiting: usize,
    /// How long a lease lasts now, nanoseconds.
    pub quantum_ns: u64,
}

/// One tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantShare {
    /// The allocation.
    pub id: String,
    /// Its GPUs.
    pub uuids: Vec<String>,
    /// Its share.
    pub share: Share,
    /// The state of its gate.
    pub state: GateState,
    /// Bound processes.
    pub processes: usize,
    /// Those that owe a drain.
    pub owing: usize,
    /// For how long it has been waiting for a lease, nanoseconds.
    pub waiting_ns: Option<u64>,
    /// Thousandths of a GPU that it had leased in the last second.
    pub got_1s_millis: u32,
    /// The same for the last ten seconds.
    pub got_10s_millis: u32,
    /// Thousandths of a GPU in which its work ran, in the last ten seconds that were measured; `None`: unknown.
    pub used_10s_millis: Option<u32>,
    /// What it has had since the arbiter took it on.
    pub totals: TenantTotals,
    /// Messages of another epoch, repeated ones, and those of a process with too many shares.
    pub ignored: u64,
    /// Its protocol violations.
    pub violations: ProtocolViolations,
}

/// The state of all GPUs and tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// GPUs that tenants have, by UUID.
    pub gpus: Vec<GpuShare>,
    /// Tenants, by id.
    pub tenants: Vec<TenantShare>,
    /// Gate words written.
    pub commands: u64,
    /// Time from receiving a message to writing the resulting gate words.
    pub turns: TurnHistogram,
    /// How long GPUs were idle while somebody wanted them, by UUID: of all that tenants have or had.
    pub idle: BTreeMap<String, IdleTotals>,
}
