//! Front ends: what asks for shares.
//!
//! The device plugin, DRA and `tessera run` are front ends. Each asks through [`FrontDoor`]. Nothing behind the door
//! knows which front end asked, but for a record's [`origin`](tessera_model::origin::Origin).

pub mod device_plugin;

use std::path::PathBuf;

pub use tessera_kubelet_api::deviceplugin::ContainerAllocateResponse;
use tessera_model::allocation_id::AllocationId;
use tessera_rules::ask::Ask;
use tessera_rules::refusal::Refusal;
use tessera_store::CommitError;
use tessera_tenant::delivery::cdi::files::FileError;
use tessera_tenant::delivery::cdi::spec::SpecError;
use tessera_tenant::delivery::driver::DriverError;
use tessera_tenant::shim_install::ShimError;

use crate::engines::EngineError;

/// The core, as a front end sees it. Both calls may wait for the disk: call them on a blocking thread, within a runtime.
pub trait FrontDoor {
    /// Judges what is asked for, enters it in the ledger, and makes what the tenants need to run: all of it or nothing.
    /// What each container is given, in the order of the asks; claims get CDI devices alone. A share of a claim that is
    /// in the ledger already stays as it is.
    fn grant(&self, asks: &[Ask]) -> Result<Vec<ContainerAllocateResponse>, AllocateError>;

    /// Ends allocations. Those that are not known have ended already.
    fn release(&self, ids: &[AllocationId]) -> Result<(), AllocateError>;
}

#[derive(Debug, thiserror::Error)]
pub enum AllocateError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("request {request}: {refusal}")]
    Request {
        /// The claim's.
        request: String,
        refusal: Refusal,
    },
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
        error: ShimError,
    },
}

impl AllocateError {
    /// What the rules say, where they are the reason.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            AllocateError::Refused(refusal) | AllocateError::Request { refusal, .. } => {
                Some(refusal)
            }
            _ => None,
        }
    }
}
