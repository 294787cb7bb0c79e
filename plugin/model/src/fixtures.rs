//! Examples, for tests of any crate.

use crate::audit::{Behind, What};
use crate::gpu::Gpu;
use crate::health;

impl Gpu {
    pub fn example(uuid: &str, index: u32) -> Self {
        Gpu {
            uuid: uuid.into(),
            index,
            minor: index,
            name: "Example".into(),
            pci_bus_id: format!("00000000:{index:02x}:00.0"),
            memory_bytes: 80 << 30,
            ..Gpu::default()
        }
    }
}

impl What {
    /// One of each kind, for tests.
    pub fn examples() -> Vec<Self> {
        let mut all = vec![What::Allocated];
        while let Some(next) = all.last().and_then(What::next_example) {
            all.push(next);
        }
        all
    }

    /// The kind that follows in the order of declaration: a new one does not compile before it has a place here.
    fn next_example(&self) -> Option<Self> {
        let (before, after, forced) = (Vec::new(), Vec::new(), true);
        Some(match self {
            What::Allocated => What::PagesKept,
            What::PagesKept => What::Started,
            What::Started => What::Parked,
            What::Parked => What::Released,
            What::Released => What::Adopted,
            What::Adopted => What::Unaccounted,
            What::Unaccounted => What::SoldByOthers,
            What::SoldByOthers => What::SoldAlone,
            What::SoldAlone => {
                What::Health { from: health::State::Suspect, to: health::State::Unhealthy }
            }
            What::Health { .. } => What::QuotaSet { before, after, forced },
            What::QuotaSet { .. } => What::QuotaReset { before, after },
            What::QuotaReset { .. } => What::Cordoned,
            What::Cordoned => What::Uncordoned,
            What::Uncordoned => What::ConfigurationReloaded { changes: Vec::new() },
            What::ConfigurationReloaded { .. } => {
                What::ConfigurationRefused { problems: Vec::new() }
            }
            What::ConfigurationRefused { .. } => {
                What::RefusedMemory { bytes: 1, charged_bytes: 2, limit_bytes: 3 }
            }
            What::RefusedMemory { .. } => {
                What::Delayed { waited_ms: 1, within_ms: 2, behind: Behind::Nobody }
            }
            What::Delayed { .. } => What::DriverRefused,
            What::DriverRefused => What::Overlapped,
            What::Overlapped => What::Rationed,
            What::Rationed => What::Unlisted,
            What::Unlisted => What::Tampered { what: "usage page".to_owned() },
            What::Tampered { .. } => What::Bypassed { pid: 7, bytes: 1 << 30 },
            What::Bypassed { .. } => What::Restored { what: "CDI spec".to_owned() },
            What::Restored { .. } => return None,
        })
    }
}
