//! Device nodes of MIG instances. To use one, a process needs, beside the GPU's own node, access to the
//! capabilities of its GPU instance and of its compute instance: `/dev/nvidia-caps/nvidia-capN`, N as
//! `/proc` says. (MIG User Guide, "Device Nodes and Capabilities".)

use std::path::Path;

use super::DriverError;

/// The nodes of one instance: of the GPU instance, of the compute instance. `proc` is `/proc`.
///
/// # Errors
/// The driver does not know the instance.
pub(super) fn nodes(
    proc: &Path,
    gpu_minor: u32,
    gpu_instance: u32,
    compute_instance: u32,
) -> Result<[String; 2], DriverError> {
    let gpu_instance = format!("gi{gpu_instance}");
    let compute_instance = format!("{gpu_instance}/ci{compute_instance}");
    let node = |instance: String| {
        minor(proc, gpu_minor, &instance)
            .map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}"))
            .ok_or_else(|| DriverError::NoCapability(format!("gpu{gpu_minor}/mig/{instance}")))
    };
    Ok([node(gpu_instance)?, node(compute_instance)?])
}

fn minor(proc: &Path, gpu: u32, instance: &str) -> Option<u32> {
    let of = format!("driver/nvidia/capabilities/gpu{gpu}/mig/{instance}/access");
    if let Ok(text) = std::fs::read_to_string(proc.join(of)) {
        let line = text.lines().find_map(|line| line.strip_prefix("DeviceFileMinor:"))?;
        return line.trim().parse().ok();
    }
    // Where NVIDIA's toolkit covers the directory, there is still the list of all minor numbers.
    let list = std::fs::read_to_string(proc.join("driver/nvidia-caps/mig-minors")).ok()?;
    let wanted = format!("gpu{gpu}/{instance}/access");
    list.lines().find_map(|line| {
        let (name, minor) = line.split_once(' ')?;
        if name == wanted { minor.trim().parse().ok() } else { None }
    })
}
