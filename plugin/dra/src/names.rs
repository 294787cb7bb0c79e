//! Names that the cluster knows: the driver, its devices, the kind of its parameters.

use sha2::{Digest, Sha256};

/// The driver's name, in slices, claims and at registration.
pub const DRIVER: &str = "gpu.tessera.dev";
/// `apiVersion` of opaque parameters.
pub const PARAMETERS_VERSION: &str = "gpu.tessera.dev/v1";
/// `kind` of opaque parameters.
pub const PARAMETERS_KIND: &str = "ShareConfig";
/// The capacity in bytes.
pub const MEMORY: &str = "memory";
/// The capacity in hundredths of a GPU's time.
pub const CORES: &str = "cores";

/// Longest name that a device may have: a DNS label, less what [`fixed_share`] adds.
const LONGEST: usize = 63 - "-share-999".len();

/// The name of a GPU's device: its UUID as a DNS label. It survives reboots, other orders of GPUs and other
/// configurations.
pub fn device(uuid: &str) -> String {
    let label: String = uuid
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
        .collect();
    let label = label.trim_matches('-');
    let is_as_it_was = label.len() == uuid.len()
        && uuid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let begins = label.as_bytes().first().is_some_and(u8::is_ascii_alphabetic);
    if is_as_it_was && begins && label.len() <= LONGEST {
        return label.to_owned();
    }
    // Not a UUID of NVML's; the hash keeps those apart that look alike as labels.
    let hash: String = Sha256::digest(uuid)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let room = LONGEST - "gpu--".len() - hash.len();
    let label = label.get(..room).unwrap_or(label).trim_matches('-');
    format!("gpu-{label}-{hash}")
}

/// The name of the `n`-th share of fixed size of a GPU, where the cluster cannot divide devices.
pub fn fixed_share(uuid: &str, n: u32) -> String {
    format!("{}-share-{n}", device(uuid))
}

/// A device's name in its parts: the GPU's device, and which fixed share of it.
pub fn parts(device: &str) -> (&str, Option<u32>) {
    let fixed = device.rsplit_once("-share-").and_then(|(gpu, n)| Some((gpu, n.parse().ok()?)));
    fixed.map_or((device, None), |(gpu, n)| (gpu, Some(n)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UUID: &str = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28";

    #[test]
    fn a_device_is_its_gpus_uuid_in_lower_case() {
        assert_eq!(device(UUID), "gpu-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28");
        assert_eq!(fixed_share(UUID, 3), "gpu-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28-share-3");
        assert_eq!(parts(&fixed_share(UUID, 3)), (device(UUID).as_str(), Some(3)));
        assert_eq!(parts(&device(UUID)), (device(UUID).as_str(), None));
    }

    #[test]
    fn what_looks_alike_as_a_label_stays_apart() {
        assert_ne!(device("GPU_a"), device("GPU-a"));
        assert_ne!(device("GPU-a-"), device("GPU-a"));
        assert_ne!(device(&"a".repeat(70)), device(&"a".repeat(71)));
    }

    proptest! {
        #[test]
        fn every_name_is_a_dns_label(uuid in ".{0,80}", n in 0u32..1000) {
            for name in [device(&uuid), fixed_share(&uuid, n)] {
                prop_assert!(!name.is_empty() && name.len() <= 63, "{}", name);
                prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
                prop_assert!(!name.starts_with('-') && !name.ends_with('-'), "{}", name);
            }
        }
    }
}
