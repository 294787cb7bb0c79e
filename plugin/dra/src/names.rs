//! Names that the cluster knows: the driver, its devices, the kind of its parameters.

use tessera_model::short_name;

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

/// Longest name that a device may have: a DNS label.
const LONGEST: usize = 63;

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
    format!("gpu-{}", short_name::with_hash(label, LONGEST - "gpu-".len(), uuid))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_device_is_its_gpus_uuid_in_lower_case() {
        let uuid = "GPU-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28";
        assert_eq!(device(uuid), "gpu-49aa2e6a-33f3-99dd-e08b-ea4beb0e0d28");
    }

    #[test]
    fn what_looks_alike_as_a_label_stays_apart() {
        assert_ne!(device("GPU_a"), device("GPU-a"));
        assert_ne!(device("GPU-a-"), device("GPU-a"));
        assert_ne!(device(&"a".repeat(70)), device(&"a".repeat(71)));
    }

    proptest! {
        #[test]
        fn every_name_is_a_dns_label(uuid in ".{0,80}") {
            let name = device(&uuid);
            prop_assert!(!name.is_empty() && name.len() <= 63, "{}", name);
            prop_assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
            prop_assert!(!name.starts_with('-') && !name.ends_with('-'), "{}", name);
        }
    }
}
