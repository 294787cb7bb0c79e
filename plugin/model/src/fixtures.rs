//! Examples, for tests of any crate.

use strum::IntoEnumIterator;

use crate::audit::What;
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
        let (from, to) = (health::State::Suspect, health::State::Unhealthy);
        let example = |what| match what {
            What::Health { .. } => What::Health { from, to },
            What::RefusedMemory { .. } => {
                What::RefusedMemory { bytes: 1, charged_bytes: 2, limit_bytes: 3 }
            }
            What::Bypassed { .. } => What::Bypassed { pid: 7, bytes: 1 << 30 },
            what => what,
        };
        What::iter().map(example).collect()
    }
}
