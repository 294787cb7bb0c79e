//! `mig` of a `[[gpu]]`: the MIG instances a GPU is cut into.
//!
//! A MIG device is a compute instance in a GPU instance. Compute instances of one GPU instance have
//! its memory in common and multiprocessors of their own (MIG User Guide, "Concepts").

use super::{ConfigError, GpuConfig, err};
use serde::Deserialize;

/// "up to seven GPU instances" (MIG User Guide, "Introduction"): compute slices of a GPU, and what
/// `nvmlDeviceGetMaxMigDeviceCount` answers.
pub const MAX_INSTANCES: usize = 7;
/// Memory slices of a GPU, of which multiprocessors are a share here.
const MEMORY_SLICES: u32 = 8;
/// Drivers before this one have no UUIDs of instances.
const FIRST_WITH_UUIDS: u32 = 470;

/// One MIG device: a compute instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigConfig {
    /// The GPU instance's id, unique on its GPU.
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub gpu_slices: u32,
    pub compute_slices: u32,
    pub memory_bytes: u64,
    pub sm_count: u32,
    /// As in the device's name: `1g.10gb`, `1c.3g.40gb`.
    pub profile: String,
    /// UUID bytes; printed as `MIG-…`.
    pub uuid: [u8; 16],
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    profile: String,
    compute: Option<Vec<String>>,
}

/// `3g.40gb`, `1g.10gb+me`, `1g.24gb-me`: compute slices, gigabytes.
fn profile(text: &str) -> Option<(u32, u64)> {
    let (plain, _attributes) = text.split_once(['+', '-']).unwrap_or((text, ""));
    let (slices, memory) = plain.split_once("g.")?;
    let slices = slices.parse().ok().filter(|s| (1..=7).contains(s))?;
    let memory = memory.strip_suffix("gb")?.parse().ok().filter(|m| (1..=1 << 17).contains(m))?;
    Some((slices, memory))
}

/// The instances that `list` cuts `gpu` into.
pub(super) fn instances(
    gpu: &GpuConfig,
    list: &[toml::Value],
    key: &str,
) -> Result<Vec<MigConfig>, ConfigError> {
    let mut all = Vec::new();
    let (mut slices, mut bytes) = (0, 0u64);
    for (at, entry) in list.iter().enumerate() {
        let key = format!("{key}[{at}]");
        let raw = match entry {
            toml::Value::String(profile) => Raw { profile: profile.clone(), compute: None },
            other => other.clone().try_into().map_err(|e: toml::de::Error| {
                ConfigError(format!("{key}: a profile or a table with one: {}", e.message()))
            })?,
        };
        let first = all.len();
        all.extend(gpu_instance(gpu, &raw, u32::try_from(at).unwrap_or(0) + 1, &key)?);
        slices += all[first].gpu_slices;
        bytes = bytes.saturating_add(all[first].memory_bytes);
    }
    if slices > 7 || all.len() > MAX_INSTANCES {
        return err(format!(
            "{key}: {slices} compute slices in {} instances; a GPU has {MAX_INSTANCES}",
            all.len()
        ));
    }
    if bytes > gpu.memory_bytes {
        return err(format!("{key}: {bytes} bytes of {}; the GPU has less", gpu.memory_bytes));
    }
    Ok(all)
}

fn gpu_instance(
    gpu: &GpuConfig,
    raw: &Raw,
    id: u32,
    key: &str,
) -> Result<Vec<MigConfig>, ConfigError> {
    let (slices, gigabytes) = profile(&raw.profile).ok_or_else(|| {
        ConfigError(format!("{key}: profile = {:?}: expected such as \"1g.10gb\"", raw.profile))
    })?;
    let share = gpu.sm_count / MEMORY_SLICES * slices;
    let sms = if slices == 7 { gpu.sm_count } else { share.max(1) };
    let parts: Vec<u32> = match &raw.compute {
        None => vec![slices],
        Some(list) => list
            .iter()
            .map(|c| c.strip_suffix('c').and_then(|n| n.parse().ok()).filter(|&n| n > 0))
            .collect::<Option<_>>()
            .ok_or_else(|| ConfigError(format!("{key}: compute: expected such as \"1c\"")))?,
    };
    if parts.is_empty() || parts.iter().sum::<u32>() > slices {
        return err(format!("{key}: compute: at least one, of {slices} slices together at most"));
    }
    let instance = |(ci, compute_slices)| MigConfig {
        gpu_instance: id,
        compute_instance: ci,
        gpu_slices: slices,
        compute_slices,
        memory_bytes: gigabytes << 30,
        sm_count: (sms * compute_slices / slices).max(1),
        profile: if compute_slices == slices {
            raw.profile.clone()
        } else {
            format!("{compute_slices}c.{}", raw.profile)
        },
        uuid: derived(gpu.uuid, id, ci),
    };
    Ok((0..).zip(parts).map(instance).collect())
}

fn derived(mut uuid: [u8; 16], gi: u32, ci: u32) -> [u8; 16] {
    uuid[4] ^= u8::try_from(gi).unwrap_or(0);
    uuid[5] ^= u8::try_from(ci + 1).unwrap_or(0);
    uuid
}

impl MigConfig {
    /// As NVML prints it and `CUDA_VISIBLE_DEVICES` takes it: "With drivers >= R470 each MIG device
    /// is assigned a GPU UUID starting with MIG-<UUID>", before that
    /// `MIG-<GPU-UUID>/<GPU instance ID>/<compute instance ID>` (MIG User Guide, "CUDA Device
    /// Enumeration").
    pub fn uuid_text(&self, gpu: &GpuConfig, driver_version: &str) -> String {
        let major = driver_version.split('.').next().and_then(|text| text.parse().ok());
        if major.is_some_and(|major: u32| major < FIRST_WITH_UUIDS) {
            let (gi, ci) = (self.gpu_instance, self.compute_instance);
            return format!("MIG-{}/{gi}/{ci}", gpu.uuid_text());
        }
        format!("MIG-{}", super::hex_uuid(&self.uuid))
    }

    /// "MIG device names which can be used to identify devices based on their attributes" (NVML,
    /// `nvmlDeviceGetName`).
    pub fn name(&self, gpu: &GpuConfig) -> String {
        format!("{} MIG {}", gpu.name, self.profile)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    fn parse(mig: &str) -> Result<Config, String> {
        let text = format!("[[gpu]]\nmemory = \"80GiB\"\nmig = {mig}\n[[gpu]]\n");
        Config::parse(&text).map_err(|e| e.0)
    }

    #[test]
    fn compute_instances_share_their_gpu_instance() {
        let config = parse(r#"[{ profile = "3g.40gb", compute = ["1c", "2c"] }]"#).unwrap();
        let mig = config.gpus[0].mig.as_ref().unwrap();
        let ids: Vec<_> = mig.iter().map(|m| (m.gpu_instance, m.compute_instance)).collect();
        assert_eq!(ids, [(1, 0), (1, 1)]);
        assert_eq!(mig[1].profile, "2c.3g.40gb");
        assert_eq!(mig[0].sm_count + mig[1].sm_count, 48);
        // Two instances of the first GPU, one whole second GPU.
        let memory: Vec<_> = config.units.iter().map(|u| u.memory.clone()).collect();
        assert_eq!(memory, [0..2, 0..2, 2..3]);
    }

    #[test]
    fn impossible_instances_are_refused() {
        for (mig, part) in [
            (r#"["10gb"]"#, "mig[0]: profile = \"10gb\": expected such as"),
            (r#"["8g.80gb"]"#, "expected such as"),
            (r#"[{ profile = "1g.10gb", memroy = 1 }]"#, "memroy"),
            (r#"["4g.40gb", "4g.40gb"]"#, "8 compute slices"),
            (r#"["4g.50gb", "3g.40gb"]"#, "the GPU has less"),
            (r#"[{ profile = "2g.20gb", compute = ["3c"] }]"#, "of 2 slices together"),
            (r#"[{ profile = "2g.20gb", compute = ["c"] }]"#, "compute: expected such as"),
        ] {
            let error = parse(mig).unwrap_err();
            assert!(error.contains("gpu 0: mig") && error.contains(part), "{mig}: {error}");
        }
    }
}
