//! Whether somebody has looked at a function of NVIDIA's: it is in the table of hooks, or in `coverage.txt`, which
//! says of each that is not hooked why. A new CUDA version can't add a way around the quota unnoticed.

use crate::hooks::HOOKS;
use crate::nvml::NVML_HOOKS;

/// Lists, each after a line with its name in brackets: reasons, with the functions indented below.
const LISTS: &str = include_str!("coverage.txt");

/// The functions of one list.
fn listed(list: &str) -> impl Iterator<Item = &'static str> {
    let is_head = move |line: &&str| line.strip_prefix('[') == Some(list);
    let rows = LISTS.lines().skip_while(move |line| !is_head(line)).skip(1);
    let rows = rows.take_while(|line| !line.starts_with('['));
    rows.filter(|line| line.starts_with(' ')).flat_map(str::split_whitespace)
}

/// Driver functions that are not hooked though they touch memory or work, without version and flavour suffix.
pub fn unhooked() -> impl Iterator<Item = &'static str> {
    listed("unhooked]")
}

/// Driver functions of no concern to a quota, likewise.
pub fn inert() -> impl Iterator<Item = &'static str> {
    listed("inert]")
}

/// A libcuda export's name without version and flavour: `cuMemcpyHtoD` of `cuMemcpyHtoD_v2_ptds`.
pub fn base_name(export: &str) -> &str {
    let plain = export.strip_suffix("_ptsz").or_else(|| export.strip_suffix("_ptds"));
    let plain = plain.unwrap_or(export);
    match plain.rsplit_once("_v") {
        Some((base, version))
            if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) =>
        {
            base
        }
        _ => plain,
    }
}

/// Whether somebody has looked at `export`, which nobody has at a new variant of a hooked function.
pub fn accounted_for(export: &str) -> bool {
    let base = base_name(export);
    HOOKS.iter().any(|hook| hook.export == export)
        || unhooked().chain(inert()).any(|known| known == base)
}

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

/// Whether an NVML function is accounted for: hooked, listed, or not about a tenant's figures.
pub fn nvml_accounted_for(export: &str) -> bool {
    let telling = TELLING.iter().any(|part| export.contains(part))
        && !ELSEWHERE.iter().any(|part| export.contains(part));
    !telling || NVML_HOOKS.contains(&export) || listed("nvml]").any(|known| known == export)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_names_lose_version_and_flavour_only() {
        assert_eq!(base_name("cuMemcpyHtoD_v2_ptds"), "cuMemcpyHtoD");
        assert_eq!(base_name("cuLaunchKernel_ptsz"), "cuLaunchKernel");
        assert_eq!(base_name("cuCtxCreate_v4"), "cuCtxCreate");
        assert_eq!(base_name("cuInit"), "cuInit");
        assert_eq!(base_name("cuX_v"), "cuX_v");
        assert_eq!(base_name("cuX_v2x"), "cuX_v2x");
    }

    #[test]
    fn no_function_is_in_two_lists() {
        let names = || unhooked().chain(inert()).chain(listed("nvml]"));
        assert!(unhooked().count() > 80 && inert().count() > 300 && listed("nvml]").count() > 30);
        for (i, name) in names().enumerate() {
            assert!(names().take(i).all(|other| other != name), "{name}");
            assert!(HOOKS.iter().all(|hook| base_name(hook.export) != name), "{name}");
            assert!(!NVML_HOOKS.contains(&name), "{name}");
        }
    }

    #[test]
    fn hooked_exports_are_unique() {
        for (i, hook) in HOOKS.iter().enumerate() {
            assert!(HOOKS[..i].iter().all(|h| h.export != hook.export), "{}", hook.export);
        }
    }

    #[test]
    fn an_unknown_variant_of_a_hooked_function_is_not_accounted_for() {
        assert!(accounted_for("cuMemAlloc_v2") && accounted_for("cuDeviceGet"));
        for unknown in ["cuMemAlloc_v3", "cuLaunchKernel_ptds", "cuBrandNew"] {
            assert!(!accounted_for(unknown), "{unknown}");
        }
    }

    #[test]
    fn a_new_version_of_a_telling_nvml_function_is_not_accounted_for() {
        assert!(nvml_accounted_for("nvmlDeviceGetMemoryInfo_v2"));
        assert!(!nvml_accounted_for("nvmlDeviceGetMemoryInfo_v3"));
        assert!(!nvml_accounted_for("nvmlDeviceGetComputeRunningProcesses_v4"));
        assert!(nvml_accounted_for("nvmlDeviceGetName"));
        assert!(nvml_accounted_for("nvmlVgpuInstanceGetFbUsage"));
    }

    #[test]
    fn every_variant_shares_its_rows_signature_and_each_body_its_class() {
        for hook in HOOKS {
            for other in HOOKS.iter().filter(|other| other.body == hook.body) {
                assert_eq!(other.class, hook.class, "{}", other.export);
                assert_eq!(base_name(other.export), base_name(hook.export), "{}", hook.body);
            }
            let own = hook.export.rsplit('_').next().filter(|of| of.starts_with("pt"));
            assert_eq!(hook.flavour, own.unwrap_or("legacy"), "{}", hook.export);
        }
    }
}
