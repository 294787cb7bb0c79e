//! Front ends: what asks for shares.
//!
//! The device plugin, DRA and `tessera run` are front ends. Each asks through [`FrontDoor`]: *plan* what an ask comes
//! to, *commit* it to the ledger, *materialise* it (pages, time, what the container is given), *release* it, and
//! listen to *events*. What was committed is a [`Transaction`] until it is materialised: nothing else changes
//! allocations meanwhile, because what it replaces still has its old limits in its pages. Nothing behind the door knows which front end asked, but for a record's
//! [`origin`](tessera_model::origin::Origin). Each step is given what the step before made.

pub mod device_plugin;
pub mod dra;

use std::path::PathBuf;
use std::sync::Arc;

use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_model::record::Record;
use tessera_rules::ask::{Ask, Plan};
use tessera_rules::refusal::Refusal;
use tessera_store::CommitError;
use tessera_tenant::delivery::cdi::files::FileError;
use tessera_tenant::delivery::cdi::spec::SpecError;
use tessera_tenant::delivery::driver::DriverError;
use tessera_tenant::shim_install::ShimError;
use tokio::sync::watch;

use crate::engines::EngineError;

/// The core, as a front end sees it. Every call but [`FrontDoor::events`] may wait for the disk: call it on a
/// blocking thread, within a runtime.
pub trait FrontDoor: Send + Sync {
    /// What an ask comes to. Changes nothing.
    ///
    /// # Errors
    /// It can never be met, or not on this node as it is now.
    fn plan(&self, ask: &Ask) -> Result<Plan, Refusal>;

    /// Enters plans in the ledger, all of them or none: room, cordons and the seller of each GPU are judged
    /// here, beside all that is live. A share of a claim that is in the ledger already stays as it is.
    ///
    /// # Errors
    /// No room, or the disk; nothing was granted then.
    fn commit(&self, plans: &[Plan]) -> Result<Box<dyn Transaction + '_>, AllocateError>;

    /// Ends allocations. Those that are not known have ended already.
    ///
    /// # Errors
    /// The ledger's disk; they are as they were then.
    fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError>;

    /// A number that is another after each change of GPUs, health, cordons, limits, or what is live.
    fn events(&self) -> watch::Receiver<u64>;
}

/// Plans that are in the ledger. What is new of them is withdrawn where this is dropped.
pub trait Transaction {
    /// The records, in the order of the plans.
    fn committed(&self) -> &[Committed];

    /// Makes what the tenants need to run, and says what their containers are given, in the order of the plans.
    /// Where one cannot be made, all that are new are withdrawn.
    ///
    /// # Errors
    /// An engine cannot hold a tenant, or its container cannot be given what it needs.
    fn materialise(self: Box<Self>) -> Result<Vec<Delivered>, AllocateError>;
}

/// Plans, commits and materialises: all asks or none. Blocking, as they are.
///
/// # Errors
/// See [`AllocateError`]; nothing was granted then.
pub fn grant(door: &dyn FrontDoor, asks: &[Ask]) -> Result<Vec<Delivered>, AllocateError> {
    let plans = asks.iter().map(|ask| door.plan(ask)).collect::<Result<Vec<Plan>, _>>()?;
    door.commit(&plans)?.materialise()
}

/// A record in the ledger, between commit and materialise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    pub record: Arc<Record>,
    /// False where it was there before: what is live stays untouched then.
    pub is_new: bool,
}

/// What a container of one allocation is given.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delivered {
    /// For kubelet's device manager.
    pub response: ContainerAllocateResponse,
    /// Qualified names of CDI devices, for kubelet's DRA manager.
    pub cdi_devices: Vec<String>,
}

/// Why a front end gets no allocation.
#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    /// The request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Ledger(#[from] CommitError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The driver, as far as we deliver it.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// What does not fit into a CDI spec.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The CDI spec's file.
    #[error(transparent)]
    SpecFile(#[from] FileError),
    /// The shim's files are gone and could not be put back.
    #[error("the shim is gone from {path} and cannot be restored: {error}")]
    Shim {
        /// Where containers mount it from.
        path: PathBuf,
        /// Why not.
        error: ShimError,
    },
}
