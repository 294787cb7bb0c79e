//! NVML functions that tell about memory, processes or utilisation, or set limits, and that Tessera
//! does not hook, each with the reason. Rows are full export names.
//!
//! NVML hands out no memory, so a gap here is a tenant that sees its neighbours' figures, not one
//! that passes its quota.

use crate::nvml::NVML_HOOKS;

/// Every NVML function that tells or limits but is not hooked.
pub const NVML_UNHOOKED: &[&str] = &[
    // About the GPU as such, which its tenants share, and naming nobody.
    "nvmlDeviceGetUtilizationRates", // how busy the GPU is, which its tenants share: a share of it would be nobody's truth
    "nvmlDeviceGetSamples",          // utilisation samples of the whole GPU
    "nvmlDeviceGetFieldValues", // power, clocks, errors, links and utilisation of the whole GPU; no field is its memory in use
    "nvmlDeviceGetBAR1MemoryInfo", // an aperture for mappings, no memory: its size is the hardware's and no quota covers it
    "nvmlDeviceGetAttributes",     // what a MIG instance is made of
    "nvmlDeviceGetAttributes_v2",  // what a MIG instance is made of
    "nvmlGpmMetricsGet",           // the whole GPU's activity
    "nvmlDevicePerfMetricsGetSamples_v1", // the whole GPU's activity
    // What needs no hook.
    "nvmlDeviceGetMemoryLimits_v1", // limits that the driver holds a cgroup to; not Tessera's quota
    "nvmlDeviceSetMemoryLimits_v1", // needs root on the host
    "nvmlDeviceGetConfComputeMemSizeInfo", // how memory is split for confidential computing
    "nvmlDeviceGetConfComputeProtectedMemoryUsage", // confidential computing is not shared
    "nvmlDeviceSetConfComputeUnprotectedMemSize", // needs root on the host
    "nvmlDeviceGetAccountingStats", // peak memory by host pid, where root has accounting on; the pids are hidden
    "nvmlDeviceGetAccountingStats_v2", // peak memory by host pid, where root has accounting on; the pids are hidden
    "nvmlSystemGetProcessName",        // reads /proc of the caller's own container
    "nvmlDeviceGetAccountingMode",     // a setting
    "nvmlDeviceGetAccountingBufferSize", // a setting
    "nvmlDeviceSetAccountingMode",     // needs root on the host
    "nvmlDeviceClearAccountingPids",   // needs root on the host
    "nvmlDeviceClearFieldValues",      // resets counters; needs root on the host
    "nvmlDeviceGetEncoderUtilization", // an engine that compute containers do not use
    "nvmlDeviceGetDecoderUtilization", // an engine that no quota covers
    "nvmlDeviceGetJpgUtilization",     // an engine that no quota covers
    "nvmlDeviceGetOfaUtilization",     // an engine that no quota covers
    "nvmlGpmSampleAlloc",              // host memory for a sample
    "nvmlGpmSampleFree",               // host memory for a sample
    "nvmlGpmSampleGet",                // an opaque sample; read with nvmlGpmMetricsGet
    "nvmlGpmMigSampleGet",             // an opaque sample of a MIG instance
    "nvmlGpmQueryDeviceSupport",       // a capability
    "nvmlGpmQueryIfStreamingEnabled",  // a setting
    "nvmlGpmSetStreamingEnabled",      // needs root on the host
];

/// Fragments of the names that tell about memory, processes or utilisation, or set limits.
const TELLING: &[&str] = &[
    "MemoryInfo",
    "MemoryLimits",
    "MemoryUsage",
    "MemSize",
    "Process",
    "Utiliz",
    "Accounting",
    "Samples",
    "FieldValues",
    "Attributes",
    "Gpm",
];
/// Of those, the ones about something else: a hypervisor's virtual GPUs, and links between GPUs.
const ELSEWHERE: &[&str] = &["Vgpu", "NvLink"];

/// Whether an NVML function is accounted for: hooked, listed here, or not about a tenant's figures.
pub fn nvml_accounted_for(export: &str) -> bool {
    let telling = TELLING.iter().any(|part| export.contains(part))
        && !ELSEWHERE.iter().any(|part| export.contains(part));
    !telling || NVML_HOOKS.contains(&export) || NVML_UNHOOKED.contains(&export)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_export_is_in_two_lists() {
        for (i, export) in NVML_UNHOOKED.iter().enumerate() {
            assert!(
                !NVML_HOOKS.contains(export) && !NVML_UNHOOKED[..i].contains(export),
                "{export}"
            );
        }
    }

    #[test]
    fn a_new_version_of_a_telling_function_is_not_accounted_for() {
        assert!(nvml_accounted_for("nvmlDeviceGetMemoryInfo_v2"));
        assert!(!nvml_accounted_for("nvmlDeviceGetMemoryInfo_v3"));
        assert!(!nvml_accounted_for("nvmlDeviceGetComputeRunningProcesses_v4"));
        assert!(nvml_accounted_for("nvmlDeviceGetName"));
        assert!(nvml_accounted_for("nvmlVgpuInstanceGetFbUsage"));
    }
}
